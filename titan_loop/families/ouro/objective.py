"""The Stage II objective: the gate learns whether one more recurrent step lowers the loss.

The language model is frozen. A step's improvement of a token's cross entropy sets the probability
with which the gate should go on; a binary cross entropy per step fits the gate to it. Only the
gate's logits carry a gradient: cross entropies and targets are detached.

Shape suffixes: R recurrent steps, P = R − 1 pairs of neighbouring steps, B batch, L sequence.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt
from torch import Tensor
from torchtitan.config import CompileConfig

from titan_loop.bounds import FINITE, Hint
from titan_loop.errors import Refusal
from titan_loop.models.exit_gate import Trainable
from titan_loop.models.output import LoopOutput
from titan_loop.models.readout import LMHead
from titan_loop.objectives.expected_loss import collapse_warning
from titan_loop.objectives.streamed_loss import (
    LossBatch,
    StreamedLoss,
    exit_metrics,
    stack_exit_logits,
    token_mean,
)


def improvement_nats(ce_RBL: Tensor) -> Tensor:
    """Return the decrease of each token's loss at every recurrent step but the first.

        I_r = max(0, CE_{r−1} − CE_r),  r = 2 … R

    Args:
        ce_RBL: Cross entropies in nats.

    Returns:
        (P, B, L) improvements in nats, ≥ 0: I_2 first. Detached.

    Source: Ouro, arXiv 2510.25741, §3.4 Eq. 5.
    """
    ce_RBL = ce_RBL.detach()
    return (ce_RBL[:-1] - ce_RBL[1:]).clamp(min=0)


def continue_target(improvement: Tensor, *, slope: float, threshold: float) -> Tensor:
    """Return w = sigmoid(k (I − γ)), the probability with which the gate should continue.

    I is never negative, so w ≥ sigmoid(−k γ): 0.438 with the published constants. A gate that fits
    its targets therefore never exits with a λ above 0.562.

    Args:
        improvement: I in nats, any shape.
        slope: k, per nat.
        threshold: γ in nats.

    Source: Ouro, arXiv 2510.25741, §3.4 (unnumbered, after Eq. 5).
    """
    return torch.sigmoid(slope * (improvement - threshold))


class AdaptiveLoss(NamedTuple):
    """The scalar loss, and its terms per pair of steps and token (detached)."""

    loss: Tensor
    improvement_PBL: Tensor
    target_PBL: Tensor
    bce_PBL: Tensor


def adaptive_loss(
    exit_logit_RBL: Tensor,
    ce_RBL: Tensor,
    labels_BL: Tensor,
    *,
    slope: float,
    threshold: float,
    valid_tokens: Tensor | float,
) -> AdaptiveLoss:
    """Return the adaptive exit loss of the gate.

        L = 1/R Σ_{r=2..R} −1/N Σ_i [ w_r log(1 − λ_r) + (1 − w_r) log λ_r ],  w_r = w(I_r)

    over the valid tokens i. As printed, gate r looks back: its target is the improvement that step
    r has already brought. Step 1 has no target and learns through the shared weights only, and λ_R
    is trained although exiting ignores it.

    | symbol | code |
    |---|---|
    | λ_r | sigmoid of `exit_logit_RBL[r - 1]` |
    | I_r, w_r | `improvement_PBL[r - 2]`, `target_PBL[r - 2]` |
    | k, γ | `slope`, `threshold` |
    | N | `valid_tokens` |

    Args:
        exit_logit_RBL: Gate logits of at least two steps; the arithmetic is fp32 or float64.
        ce_RBL: Cross entropies in nats; no gradient flows into them.
        labels_BL: Next-token ids. Ignored labels do not count.
        slope: k > 0, per nat.
        threshold: γ ≥ 0, in nats.
        valid_tokens: N, the valid tokens of the global batch, not only of this call.

    Returns:
        The loss, at least fp32, and I, w and the binary cross entropy in nats, each (P, B, L).

    Source: Ouro, Zhu et al. 2025, arXiv 2510.25741, §3.4 Eq. 5 and 6 and the total after them.
    Deviations: the mean is over the valid tokens of the global batch, not of one sequence. The
        paper normalises by the number of steps, not of terms; so does this.
    """
    assert len(exit_logit_RBL) >= 2, "the adaptive gate loss compares neighbouring steps"
    improvement_PBL = improvement_nats(ce_RBL)
    target_PBL = continue_target(improvement_PBL, slope=slope, threshold=threshold)
    logit_PBL = exit_logit_RBL[1:]
    dtype = torch.promote_types(logit_PBL.dtype, torch.float32)
    bce_PBL = F.binary_cross_entropy_with_logits(
        logit_PBL.to(dtype), 1 - target_PBL.to(dtype), reduction="none"
    )
    mean_bce_P = token_mean(bce_PBL, labels_BL, valid_tokens)
    return AdaptiveLoss(
        mean_bce_P.sum() / len(exit_logit_RBL), improvement_PBL, target_PBL, bce_PBL.detach()
    )


class AdaptiveGateLoss(StreamedLoss):
    """The Stage II objective as a torchtitan loss.

    Its metrics come from `exit_metrics`, with these means over the valid tokens of the global
    batch:

    | key | meaning |
    |---|---|
    | `improvement/step_2` … `improvement/step_R` | I_r in nats |
    | `gate/target_2` … `gate/target_R` | the target w of gate r |
    | `gate/bce_2` … `gate/bce_R` | the binary cross entropy of gate r in nats |
    """

    @dataclass(kw_only=True, slots=True)
    class Config(StreamedLoss.Config):
        """Constants of the gate's target."""

        slope: Annotated[float, Gt(0), FINITE, Hint("the paper uses 50")] = 50.0
        """k, the sharpness of the target's turn from exit to continue, per nat."""

        threshold: Annotated[float, Ge(0), FINITE, Hint("the paper uses 0.005")] = 0.005
        """γ, the improvement in nats at which exit and continue are equally good."""

        def refusals(
            self, *, trainable: Trainable, exit_gate: bool, fewest_steps: int
        ) -> Iterator[Refusal]:
            """Refuse constants that make no target, and runs in which no gate could learn."""
            if trainable == "all":
                yield Refusal(
                    "trainable",
                    "trainable=all with loss=AdaptiveGateLoss.Config: this loss has no gradient "
                    "for the language model",
                    "set trainable to exit_gate",
                )
            if not exit_gate:
                yield Refusal(
                    "model.exit_gate",
                    "trainable=exit_gate needs a gate, and model.exit_gate=False",
                    "set it to True",
                )
            if fewest_steps < 2:
                yield Refusal(
                    "recurrence.steps",
                    f"trainable=exit_gate with recurrence.steps: R can be {fewest_steps}, and the "
                    "gate learns from the difference of two steps",
                    "keep it at 2 or more (recurrence.min_steps=2)",
                )

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        super().__init__(config, compile_config=compile_config)
        self.slope = config.slope
        self.threshold = config.threshold

    def warning(self, metrics: Mapping[str, Any]) -> str | None:
        """Return one line if the gate has collapsed onto one step, else None."""
        fix = "see in improvement/step_r whether later steps help, and change loss.threshold"
        return collapse_warning(metrics, fix=fix)

    def compute(
        self, readout: LMHead, output: LoopOutput, batch: LossBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        labels_BL, valid_tokens = batch.labels_BL, batch.valid_tokens
        assert output.exit_logit_RBL, "the model has no exit gate"
        exit_logit_RBL = stack_exit_logits(output.exit_logit_RBL)
        with torch.no_grad():  # else the head computes gradients in its forward pass
            _, ce_RBL = readout(
                output.hidden_RBLD,
                labels_BL=labels_BL,
                weight_RBL=torch.zeros_like(exit_logit_RBL),
                rows_T=batch.labelled_T,
            )
        adaptive = adaptive_loss(
            exit_logit_RBL,
            ce_RBL,
            labels_BL,
            slope=self.slope,
            threshold=self.threshold,
            valid_tokens=valid_tokens,
        )
        metrics = exit_metrics(ce_RBL, exit_logit_RBL.detach(), labels_BL, valid_tokens)
        for name, value_PBL in (
            ("improvement/step", adaptive.improvement_PBL),
            ("gate/target", adaptive.target_PBL),
            ("gate/bce", adaptive.bce_PBL),
        ):
            mean_P = token_mean(value_PBL, labels_BL, valid_tokens)
            metrics |= {f"{name}_{r}": mean for r, mean in enumerate(mean_P, start=2)}
        return adaptive.loss, metrics
