"""The objective of a stage of rewards: log π of each token at the step at which it left.

    states of R steps ─► the state of each token's exit ─► log π (streamed) ─┐
    exit logits ─► log p(e), where the exit is an action ────────────────────┴─► clipped loss
    states of R steps ─► log π_r ─► Σ_r ω_r log π_r, for RLTT ───────────────────┘

Shape suffixes as in `objectives/`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config.configs import ParallelismConfig

from titan_loop.bounds import FINITE
from titan_loop.errors import Refusal
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.exit_gate import Trainable
from titan_loop.models.output import LoopOutput
from titan_loop.models.readout import LMHead
from titan_loop.objectives.exit_distribution import (
    exit_entropy_nats,
    exit_log_pmf,
    exit_pmf,
    mean_exit_step,
)
from titan_loop.objectives.streamed_loss import (
    LossBatch,
    StreamedLoss,
    stack_exit_logits,
    token_mean,
)
from titan_loop.rl.objectives import clipped_loss, kl_estimate, trajectory_log_prob

ADVANTAGE, WEIGHT, READ_STEP = "advantage", "token_weight", "read_step"
ENGINE_LOG_PROB, PARENT_LOG_PROB = "engine_log_prob", "parent_log_prob"
OLD_LOG_PROB, OLD_EXIT_LOG_PROB = "old_log_prob", "old_exit_log_prob"
MOST_GAP_NATS = 1e-3
"""Mean distance of the engine's and the trainer's log π above which a run warns."""


class RewardLoss(StreamedLoss):
    """GRPO and DAPO (`objectives.py`) on log π of every token.

    The advantage and the weight of each token are columns of the batch, and so is log π_old, NaN in
    the first update of an answer: there π_old is π without its gradient.

    | metric | meaning |
    |---|---|
    | `rl/gap_nats` | mean distance of the engine's log π from this pass' |
    | `rl/kl_nats` | estimate of KL(π ‖ parent), with `kl_weight` |
    | `rl/clipped` | share of tokens whose ratio is clipped, which then have no gradient |
    | `rl/exit_step` | mean step at which tokens left |
    | `rl/entropy_nats`, `rl/gate_step` | entropy and mean of the exit distribution, with a gate |
    """

    @dataclass(kw_only=True, slots=True)
    class Config(StreamedLoss.Config):
        """The objective; advantages come from `RolloutLoader`."""

        columns: ClassVar[tuple[str, ...]] = (
            *(ADVANTAGE, WEIGHT, READ_STEP),
            *(ENGINE_LOG_PROB, OLD_LOG_PROB, OLD_EXIT_LOG_PROB, PARENT_LOG_PROB),
        )
        one_depth: ClassVar[bool] = True  # the engine writes all answers with one R

        exit_action: bool = False
        """Whether the exit is an action, too: log p(e) of the gate joins log π of its token."""

        trajectory: Literal["off", "uniform", "progressive", "pmf"] = "off"
        """RLTT: ω of Σ ω_r log π_r in place of log π: 1/R, r / Σ r, or the exit distribution."""

        clip_low: Annotated[float, Gt(0), Lt(1)] = 0.2
        """ε_low: the ratio is clipped below 1 − ε_low."""

        clip_high: Annotated[float, Gt(0), FINITE] = 0.28
        """ε_high: the ratio is clipped above 1 + ε_high; DAPO's 0.28, GRPO has 0.2."""

        kl_weight: Annotated[float, Ge(0), FINITE] = 0.0
        """Weight of KL(π ‖ parent); `dataloader.parent` names the parent."""

        def refusals(
            self, *, trainable: Trainable, exit_gate: bool, fewest_steps: int
        ) -> Iterator[Refusal]:
            """As in the base class; the exit of a model without a gate is no action."""
            yield from StreamedLoss.Config.refusals(
                self, trainable=trainable, exit_gate=exit_gate, fewest_steps=fewest_steps
            )
            if self.exit_action and not exit_gate:
                yield Refusal.of("loss.exit_action", True, "needs model.exit_gate")
            if self.trajectory == "pmf" and not exit_gate:
                yield Refusal.of("loss.trajectory", "pmf", "needs model.exit_gate")
            if self.exit_action and self.trajectory != "off":
                yield Refusal.of(
                    "loss.exit_action",
                    True,
                    f"has no effect with loss.trajectory={self.trajectory}",
                )

        def parallelism_refusals(self, parallelism: ParallelismConfig) -> Iterator[Refusal]:
            """Refuse ranks that share a window: answers are written by whole models."""
            for name in ("tensor_parallel_degree", "context_parallel_degree"):
                if (degree := getattr(parallelism, name)) > 1:
                    problem = "does not work with loss=RewardLoss, whose answers whole models write"
                    yield Refusal.of(f"parallelism.{name}", degree, problem, "leave it at 1")

        def model_refusals(self, model: LoopDecoder.Config) -> Iterator[Refusal]:
            """Refuse a coda, whose keys no pass over all tokens computes (`models/replay.py`)."""
            coda = len(model.layers) - model.looped.stop
            if coda and self.trajectory == "off":
                problem = (
                    "does not work with loss=RewardLoss: later tokens see the keys of its exit"
                )
                yield Refusal.of("model.coda_layers", coda, problem, "set it to 0")

    config: Config

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.config = config

    def warning(self, metrics: Mapping[str, Any]) -> str | None:
        """Warn where engine and trainer disagree on the same token at the same step."""
        gap = metrics.get("rl/gap_nats", 0.0)
        if gap <= MOST_GAP_NATS:
            return None
        return (
            f"the engine's and the trainer's log-probabilities differ by {gap:.2g} nats a token, "
            f"above {MOST_GAP_NATS:g}: answers come from another model than the one that is "
            "updated; train in fp32, or look for a part that decodes otherwise"
        )

    def compute(
        self, readout: LMHead, output: LoopOutput, batch: LossBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As in the base class; only tokens of answers have labels and columns."""
        config, columns, labels_BL = self.config, batch.columns, batch.labels_BL
        valid_BL = labels_BL != IGNORE_INDEX
        step_BL = columns[READ_STEP].clamp(min=1)
        with_gate = len(output.exit_logit_RBL) > 0
        gate_RBL = stack_exit_logits(output.exit_logit_RBL) if with_gate else None
        states = output.hidden_RBLD
        if config.trajectory == "off":
            states = (_at(states, step_BL),)
        # Read once more than by other objectives, whose weights need no log π.
        log_prob_RBL = _log_probs(readout, states, labels_BL, batch.labelled_T).requires_grad_()
        log_prob_BL = log_prob_RBL[0]
        if config.trajectory != "off":
            log_prob_BL = trajectory_log_prob(log_prob_RBL, self._omega(log_prob_RBL, gate_RBL))
        action_BL, old_BL = log_prob_BL, columns[OLD_LOG_PROB]
        if config.exit_action:
            assert gate_RBL is not None
            action_BL = log_prob_BL + _exit_log_prob(gate_RBL, step_BL)
            old_BL = old_BL + columns[OLD_EXIT_LOG_PROB]
        old_BL = torch.where(old_BL.isnan(), action_BL.detach(), old_BL)
        clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
        token_BL = clipped_loss(action_BL, old_BL, columns[ADVANTAGE], **clip)
        metrics: dict[str, Tensor] = {}
        mean = {"labels_BL": labels_BL, "valid_tokens": batch.valid_tokens}
        if config.kl_weight:
            # Of the step that was read, in RLTT the last one.
            kl_BL = kl_estimate(log_prob_RBL[-1], columns[PARENT_LOG_PROB])
            token_BL = token_BL + config.kl_weight * kl_BL
            metrics["rl/kl_nats"] = token_mean(kl_BL.detach(), **mean)
        loss = torch.where(valid_BL, columns[WEIGHT] * token_BL, 0.0).sum()
        # The readout takes dL/dlog π as the weights of the cross entropies, so that no logits live.
        (pull_RBL,) = torch.autograd.grad(loss, log_prob_RBL, retain_graph=True)
        streamed, _ = readout(
            states, labels_BL=labels_BL, weight_RBL=-pull_RBL, rows_T=batch.labelled_T
        )
        loss = loss + (streamed - streamed.detach())
        with torch.no_grad():
            ratio_BL, better = (action_BL - old_BL).exp(), columns[ADVANTAGE] > 0
            above_BL, below_BL = ratio_BL > 1 + config.clip_high, ratio_BL < 1 - config.clip_low
            clipped_BL = (better & above_BL) | ((columns[ADVANTAGE] < 0) & below_BL)
            metrics["rl/clipped"] = token_mean(clipped_BL.to(loss.dtype), **mean)
            if config.trajectory == "off":
                old_BL = columns[OLD_LOG_PROB]  # later updates move π, which is no gap
                there_BL = torch.where(old_BL.isnan(), log_prob_BL, old_BL)
                gap_BL = (there_BL - columns[ENGINE_LOG_PROB]).abs()
                metrics["rl/gap_nats"] = token_mean(gap_BL, **mean)
            metrics["rl/exit_step"] = token_mean(step_BL.to(loss.dtype), **mean)
            if gate_RBL is not None:
                metrics["rl/entropy_nats"] = token_mean(exit_entropy_nats(gate_RBL), **mean)
                metrics["rl/gate_step"] = token_mean(mean_exit_step(gate_RBL), **mean)
        return loss, metrics

    def _omega(self, log_prob_RBL: Tensor, gate_RBL: Tensor | None) -> Tensor:
        """Return ω, (R, 1, 1), or (R, B, L) from the gate, which it does not train."""
        if self.config.trajectory == "pmf":
            assert gate_RBL is not None
            return exit_pmf(gate_RBL).detach()
        steps, device = len(log_prob_RBL), log_prob_RBL.device
        step_R = torch.arange(1, steps + 1, dtype=torch.float32, device=device)
        if self.config.trajectory == "uniform":
            step_R = torch.ones_like(step_R)
        return (step_R / step_R.sum()).view(-1, 1, 1)


@torch.no_grad()
def written_log_probs(
    readout: LMHead, output: LoopOutput, labels_BL: Tensor, step_BL: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log π of each token at its step, and log p of its exit, (B, L); 0 without a gate."""
    step_BL = step_BL.clamp(min=1)
    (log_prob_BL,) = _log_probs(readout, (_at(output.hidden_RBLD, step_BL),), labels_BL, None)
    if not output.exit_logit_RBL:
        return log_prob_BL, torch.zeros_like(log_prob_BL)
    return log_prob_BL, _exit_log_prob(stack_exit_logits(output.exit_logit_RBL), step_BL)


def _log_probs(
    readout: LMHead, states: tuple[Tensor, ...], labels_BL: Tensor, rows_T: Tensor | None
) -> Tensor:
    """Return log π of the labels by each state, (R, B, L), without a gradient."""
    with torch.no_grad():
        nothing_RBL = torch.zeros(len(states), *labels_BL.shape, device=labels_BL.device)
        _, ce_RBL = readout(states, labels_BL=labels_BL, weight_RBL=nothing_RBL, rows_T=rows_T)
    return -ce_RBL


def _exit_log_prob(gate_RBL: Tensor, step_BL: Tensor) -> Tensor:
    return exit_log_pmf(gate_RBL).gather(0, step_BL[None] - 1)[0]


def _at(states: tuple[Tensor, ...], step_BL: Tensor) -> Tensor:
    """Return each token's state after its own step, (B, L, D)."""
    chosen_BLD = states[0]
    for step, state_BLD in enumerate(states[1:], start=2):
        chosen_BLD = torch.where(step_BL.unsqueeze(-1) >= step, state_BLD, chosen_BLD)
    return chosen_BLD
