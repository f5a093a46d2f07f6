"""The Stage I objective: cross entropy expected over exit steps, less β times the exit entropy.

Every term is divided by the valid target tokens of the *global* batch, so the contributions of
micro-batches and data-parallel ranks add up.

Shape suffixes: R recurrent steps, B batch, L sequence, D width.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import CompileConfig

from titan_loop.bounds import FINITE, Hint
from titan_loop.errors import Refusal
from titan_loop.models.exit_gate import Trainable
from titan_loop.models.output import Collect, LoopOutput
from titan_loop.models.readout import LMHead
from titan_loop.objectives.exit_distribution import (
    exit_entropy_nats,
    exit_pmf,
    geometric_prior,
    kl_to_prior,
)
from titan_loop.objectives.streamed_loss import (
    LossBatch,
    StreamedLoss,
    exit_metrics,
    stack_exit_logits,
)

Prior: TypeAlias = Literal["uniform", "geometric"]

COLLAPSED_ENTROPY_SHARE = 0.01
"""Share of the largest entropy, log R, below which the exit distribution counts as collapsed."""

DOMINANT_STEP_PROBABILITY = 0.99
"""Mean probability of one exit step above which the exit distribution counts as collapsed."""


class ExpectedLoss(NamedTuple):
    """The scalar loss in nats per token, and CE_r per token, (R, B, L), detached."""

    loss: Tensor
    ce_RBL: Tensor


def expected_loss(
    head: LMHead,
    hidden_RBLD: Sequence[Tensor],
    exit_logit_RBL: Tensor,
    labels_BL: Tensor,
    *,
    entropy_weight: float,
    valid_tokens: Tensor | float,
    geometric_eta: float | None = None,
    z_loss: float = 0.0,
    rows_T: Tensor | None = None,
) -> ExpectedLoss:
    """Return the entropy-regularised loss expected over exit steps.

        L = 1/N Σ_i [ Σ_r p_r CE_r − β H(p) ]                   uniform prior (no geometric_eta)
        L = 1/N Σ_i [ Σ_r p_r CE_r + β (KL(p ‖ π) − log R) ]    geometric prior

    over the valid tokens i. With π uniform both are equal, so losses under both priors compare.

    | symbol | code |
    |---|---|
    | p_r, π | `exit_pmf(exit_logit_RBL)`, `geometric_prior(R, geometric_eta)` |
    | CE_r | `ce_RBL`, from `head` |
    | β, N | `entropy_weight`, `valid_tokens` of the global batch |

    Gradients flow through p into gate and model; nothing is detached. With ζ = `z_loss` > 0, 1/N
    Σ_i Σ_r p_r ζ z_r² is added, in which p is a constant; `rows_T` as in `LMHead`.

    Source: Ouro, Zhu et al. 2025, arXiv 2510.25741, §3.3 Eq. 4 and the negative ELBO after it;
        geometric prior: Appendix A.
    Deviations: Eq. 2 sums CE over positions while p in Eq. 4 is per input; here p, CE and H are
        averaged over tokens, which makes β H the few percent of the loss that the paper reports
        (Appendix D). The constant −β log R is ours; no gradient sees it.
    """
    expected_ce, ce_RBL = head(
        hidden_RBLD,
        labels_BL=labels_BL,
        weight_RBL=exit_pmf(exit_logit_RBL) / valid_tokens,
        z_loss=z_loss,
        rows_T=rows_T,
    )
    penalty = exit_penalty(
        exit_logit_RBL, labels_BL, valid_tokens=valid_tokens, geometric_eta=geometric_eta
    )
    return ExpectedLoss(expected_ce + entropy_weight * penalty, ce_RBL)


def exit_penalty(
    exit_logit_RBL: Tensor,
    labels_BL: Tensor,
    *,
    valid_tokens: Tensor | float,
    geometric_eta: float | None = None,
) -> Tensor:
    """Return the mean of −H(p), or of KL(p ‖ π) − log R, in nats; see `expected_loss`."""
    if geometric_eta is None:
        penalty_BL = -exit_entropy_nats(exit_logit_RBL)
    else:
        steps = len(exit_logit_RBL)
        prior_R = geometric_prior(steps, geometric_eta, device=exit_logit_RBL.device)
        penalty_BL = kl_to_prior(exit_logit_RBL, prior_R) - math.log(steps)
    return torch.where(labels_BL != IGNORE_INDEX, penalty_BL, 0.0).sum() / valid_tokens


class ExpectedExitLoss(StreamedLoss):
    """The Stage I objective as a torchtitan loss; `exit_metrics` has its metrics.

    A model without a gate has its last state's plain cross entropy as its loss and `ce/step_R` as
    its only metric.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(StreamedLoss.Config):
        """The prior over exit steps; its weight β is a schedule of the run."""

        schedules: ClassVar[tuple[str, ...]] = ("entropy_weight",)

        prior: Prior = "uniform"
        """Prior over exit steps."""

        geometric_eta: Annotated[float, Gt(0), Lt(1)] = 0.5
        """η of the geometric prior, in (0, 1); a larger one prefers shallower steps."""

        z_loss: Annotated[float, Ge(0), FINITE, Hint("PaLM used 1e-4")] = 0.0
        """ζ, the weight of (log Σ exp(logits))²; PaLM used 1e-4. 0 turns it off."""

        def collect(self, *, exit_gate: bool) -> Collect:
            """Return all steps with a gate, else the last."""
            return "all" if exit_gate else "last"

        def refusals(
            self, *, trainable: Trainable, exit_gate: bool, fewest_steps: int
        ) -> Iterator[Refusal]:
            """As in the base class; refuse settings of a prior that is not there."""
            yield from StreamedLoss.Config.refusals(
                self, trainable=trainable, exit_gate=exit_gate, fewest_steps=fewest_steps
            )
            if self.prior == "uniform" and self.geometric_eta != type(self)().geometric_eta:
                problem = "has no effect with loss.prior=uniform"
                fix = "set loss.prior=geometric, or leave it out"
                yield Refusal.of("loss.geometric_eta", self.geometric_eta, problem, fix)
            if self.prior != "uniform" and not exit_gate:
                problem = "has no effect with model.exit_gate=False; leave it out"
                yield Refusal.of("loss.prior", self.prior, problem)

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        super().__init__(config, compile_config=compile_config)
        self.z_loss = config.z_loss
        self.geometric_eta = config.geometric_eta if config.prior == "geometric" else None
        self.entropy_weight = 0.0

    def set_schedules(self, values: Mapping[str, float]) -> None:
        self.entropy_weight = values["entropy_weight"]

    def warning(self, metrics: Mapping[str, Any]) -> str | None:
        """Return one line if the exit distribution has collapsed, else None."""
        return collapse_warning(metrics)

    def compute(
        self, readout: LMHead, output: LoopOutput, batch: LossBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        labels_BL, valid_tokens = batch.labels_BL, batch.valid_tokens
        if not output.exit_logit_RBL:
            loss, ce_RBL = readout(
                output.hidden_RBLD[-1:],
                labels_BL=labels_BL,
                weight_RBL=torch.ones(1, *labels_BL.shape, device=labels_BL.device) / valid_tokens,
                z_loss=self.z_loss,
                rows_T=batch.labelled_T,
            )
            last_step = output.first_step + len(output.hidden_RBLD) - 1
            return loss, {f"ce/step_{last_step}": ce_RBL.sum(dim=(1, 2))[0] / valid_tokens}
        exit_logit_RBL = stack_exit_logits(output.exit_logit_RBL)
        loss, ce_RBL = expected_loss(
            readout,
            output.hidden_RBLD,
            exit_logit_RBL,
            labels_BL,
            entropy_weight=self.entropy_weight,
            valid_tokens=valid_tokens,
            geometric_eta=self.geometric_eta,
            z_loss=self.z_loss,
            rows_T=batch.labelled_T,
        )
        return loss, exit_metrics(ce_RBL, exit_logit_RBL.detach(), labels_BL, valid_tokens)


def collapse_warning(
    metrics: Mapping[str, Any], *, fix: str = "raise entropy_weight"
) -> str | None:
    """Return one line, with the remedy `fix`, if the exit distribution has collapsed, else None.

    Collapsed means: the mean entropy is below 1 % of log R, or one step has more than 99 % of the
    mean mass. Ouro §3.3 describes how a gate without the entropy term collapses by itself.
    `metrics` are *global* means; without the keys of `exit_metrics` there is no warning.
    """
    pmf: list[float] = []
    while (key := f"exit/pmf_{len(pmf) + 1}") in metrics:
        pmf.append(float(metrics[key]))
    recurrent_steps = len(pmf)
    if recurrent_steps < 2:
        return None
    entropy_share = float(metrics["exit/entropy_nats"]) / math.log(recurrent_steps)
    if entropy_share < COLLAPSED_ENTROPY_SHARE:
        return (
            f"exit distribution collapsed: its entropy is {entropy_share:.2%} of "
            f"log {recurrent_steps}; {fix}"
        )
    top = max(range(recurrent_steps), key=pmf.__getitem__)
    if pmf[top] > DOMINANT_STEP_PROBABILITY:
        return (
            f"exit distribution collapsed: recurrent step {top + 1} of {recurrent_steps} takes "
            f"{pmf[top]:.2%} of the exits; {fix}"
        )
    return None
