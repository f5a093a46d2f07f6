"""Stage I in which early steps become readable at little cost to the last one.

    L = (1 − s) CE_R + s [ Σ_r p_r C_r − β H(p) ]
    C_r = (1 − δ) CE_r + δ KL(P_R ‖ P_r) for r < R,   C_R = CE_R

| symbol | code |
|---|---|
| s | `every_step`: a schedule over training |
| p_r | `weights`: the gate's, or constants, which train no gate |
| δ | `distillation` |
| P_r | the distribution of the next token after step r |

P_R is a constant where an early step learns from it. The gate learns from CE_r in place
of C_r: a KL is usually smaller than a CE, so a gate that saw it would exit early. With the defaults
this is Ouro's Stage I, bit for bit. While s is 0, only the last step is read out.

Sources: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §3.3 Eq. 4 (the objective that it extends); Zhang
et al. 2019, arXiv 1905.08094, §3 (early layers of a network that learn from the last).

Shape suffixes: R recurrent steps, P = R − 1 early ones, B batch, L sequence, D width.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, TypeAlias

import torch
from annotated_types import Ge, Le
from torch import Tensor
from torchtitan.config import CompileConfig

from titan_loop.bounds import Hint
from titan_loop.errors import Refusal
from titan_loop.models.exit_gate import Trainable
from titan_loop.models.output import LoopOutput
from titan_loop.models.readout import LMHead
from titan_loop.objectives.exit_distribution import exit_pmf
from titan_loop.objectives.expected_loss import ExpectedExitLoss, exit_penalty
from titan_loop.objectives.streamed_distillation import Targets, distilled_loss
from titan_loop.objectives.streamed_loss import (
    LossBatch,
    exit_metrics,
    stack_exit_logits,
    token_mean,
)
from titan_loop.training.schedule import Schedule

StepWeights: TypeAlias = Literal["gate", "even", "first"]
"""Weights p_r of the steps' losses: the exit gate's p, 1/R each, or 1/R for the last step and the
rest in proportion to 1/r²: step 1, the hardest to read without harm to the last, has most of it."""


class ReadableStepsLoss(ExpectedExitLoss):
    """Ouro's Stage I with options for its early steps, as a torchtitan loss.

    Its metrics are as in `ExpectedExitLoss`, with these means over the valid tokens of the global
    batch. While s is 0, `ce/step_R` stands in place of the base class's.

    | key | meaning |
    |---|---|
    | `kl/step_1` … `kl/step_{R−1}` | KL(P_R ‖ P_r) in nats, with distillation |
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ExpectedExitLoss.Config):
        """Weight and source of the early steps' losses."""

        schedules: ClassVar[tuple[str, ...]] = ("entropy_weight", "every_step")

        every_step: Annotated[Schedule, Ge(0), Le(1), Hint("1 is Stage I")] = field(
            default_factory=lambda: Schedule.constant(1.0)
        )
        """s against global tokens: 0 is the loss of the last step alone, 1 is Stage I."""

        weights: StepWeights = "gate"
        """Weights of the steps' losses: gate (the gate's p), even (1/R each), or first (1/R for the
        last step, the rest in proportion to 1/r²). Only gate trains the gate before Stage II."""

        distillation: Annotated[float, Ge(0), Le(1)] = 0.0
        """δ in [0, 1], the weight of the KL divergence from the last step's distribution in an
        early step's loss; its cross entropy has 1 − δ."""

        def refusals(
            self, *, trainable: Trainable, exit_gate: bool, fewest_steps: int
        ) -> Iterator[Refusal]:
            """Refuse options without effect."""
            yield from ExpectedExitLoss.Config.refusals(
                self, trainable=trainable, exit_gate=exit_gate, fewest_steps=fewest_steps
            )
            if not exit_gate:
                problem = "ReadableStepsLoss weighs steps that a gate can choose"
                fix = "set it to True, with loss.weights=even if Stage II is to train it"
                yield Refusal.of("model.exit_gate", exit_gate, problem, fix)
            if self.distillation and not self.every_step.largest:
                problem = "has no effect with loss.every_step=0, which reads no early step"
                yield Refusal.of(
                    "loss.distillation", self.distillation, problem, "raise every_step"
                )

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        super().__init__(config, compile_config=compile_config)
        self.weights: StepWeights = config.weights
        self.distillation = config.distillation
        self.every_step = 1.0

    def set_schedules(self, values: Mapping[str, float]) -> None:
        """Take β and s of this training step."""
        super().set_schedules(values)
        self.every_step = values["every_step"]

    def compute(
        self, readout: LMHead, output: LoopOutput, batch: LossBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and the metrics of one micro-batch; arguments as in `StreamedLoss`."""
        labels_BL, valid_tokens = batch.labels_BL, batch.valid_tokens
        exit_logit_RBL = stack_exit_logits(output.exit_logit_RBL)
        loss, metrics = self._read_out(readout, output.hidden_RBLD, exit_logit_RBL, batch)
        # Added even with weight 0: a gate without any gradient would drop out of the graph.
        gate_learns = self.every_step if self.weights == "gate" else 0.0
        penalty = exit_penalty(
            exit_logit_RBL, labels_BL, valid_tokens=valid_tokens, geometric_eta=self.geometric_eta
        )
        return loss + gate_learns * self.entropy_weight * penalty, metrics

    def _read_out(
        self,
        readout: LMHead,
        hidden_RBLD: Sequence[Tensor],
        exit_logit_RBL: Tensor,
        batch: LossBatch,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the terms that need logits, and their metrics."""
        labels_BL, valid_tokens = batch.labels_BL, batch.valid_tokens
        steps = len(hidden_RBLD)
        pmf_RBL = exit_pmf(exit_logit_RBL)
        if self.weights != "gate":
            constant_R11 = constant_weights(self.weights, steps).to(pmf_RBL)[:, None, None]
            pmf_RBL = constant_R11.expand_as(pmf_RBL)
        weight_RBL = self.every_step * pmf_RBL
        weight_RBL[-1] += 1 - self.every_step
        weight_RBL = weight_RBL / valid_tokens
        distils = self.distillation > 0 and steps > 1
        first = steps - 1 if distils or not self.every_step else 0
        loss, ce_RBL = readout(
            hidden_RBLD[first:],
            labels_BL=labels_BL,
            weight_RBL=weight_RBL[first:],
            z_loss=self.z_loss,
            rows_T=batch.labelled_T,
        )
        if not self.every_step:
            return loss, {f"ce/step_{steps}": token_mean(ce_RBL[0], labels_BL, valid_tokens)}
        kl_P = torch.zeros(0)
        if distils:
            assert isinstance(readout, LMHead)
            targets = Targets(labels_BL, self.distillation, valid_tokens=1.0)
            early_weight_PBL = weight_RBL[:-1]
            early = distilled_loss(
                readout, hidden_RBLD[:-1], hidden_RBLD[-1], targets, early_weight_PBL.detach()
            )
            # Zero in the loss; gives p the gradient of the cross entropies, without the KL.
            for_gate = (early_weight_PBL * early.ce_SBL).sum()
            loss = loss + early.loss + (for_gate - for_gate.detach())
            ce_RBL = torch.cat([early.ce_SBL, ce_RBL])
            kl_P = token_mean(early.kl_SBL, labels_BL, valid_tokens)
        metrics = exit_metrics(ce_RBL, exit_logit_RBL.detach(), labels_BL, valid_tokens)
        by_step = {f"kl/step_{r}": value for r, value in enumerate(kl_P, start=1)}
        return loss, metrics | by_step


def constant_weights(kind: StepWeights, steps: int) -> Tensor:
    """Return p (R,), float64, of the kinds that do not ask the gate; they sum to 1."""
    if kind == "even" or steps == 1:
        return torch.full((steps,), 1 / steps, dtype=torch.float64)
    weight_R = torch.arange(1, steps + 1, dtype=torch.float64) ** -2
    weight_R[:-1] *= (1 - 1 / steps) / weight_R[:-1].sum()
    weight_R[-1] = 1 / steps
    return weight_R
