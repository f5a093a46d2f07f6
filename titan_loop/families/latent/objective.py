"""Latent algorithmic supervision: the labels of a step are the values that are due by then.

    L = 1/N Σ_t Σ_i Σ_f CE(W_f H_i^t, y_{f,i}^t)
    y_value,i^t = solved value where depth(i) ≤ t, else EMPTY

over the N positions i that have a label: all of them, or the answers alone if the loader has
`all_targets=False`. Labels of syntax, variable and operation are the same in every step. With
`masked`, a value that is not due has no label instead of EMPTY. As in Eq. 6 the loss is a sum over
steps, so that deep graphs have larger gradients; the authors' code takes the mean for discrete
models (`mean_over_steps`) and the sum for continuous ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX

from titan_loop.models.output import LoopOutput
from titan_loop.objectives.streamed_loss import LossBatch, StreamedLoss


class LatentSupervision(StreamedLoss):
    """The loss of every step and factor of a latent-space model.

    | key | meaning |
    |---|---|
    | `ce/step_1` … `ce/step_R` | cross entropy of the value factor, nats per label |
    | `ce/factors` | cross entropy of the other factors, summed over them, mean over steps |

    Source: arXiv 2510.14095, Eq. 3, 5 and 6, Appendix B.2. Deviation, after the authors' code: a
    value that is not due has the label EMPTY, where Eq. 5 leaves it out (`masked`): a discrete
    model must predict something at every position, and in training the next step reads EMPTY there.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(StreamedLoss.Config):
        """Treatment of values that are not due, and sum or mean over steps."""

        columns: ClassVar[tuple[str, ...]] = ("factors", "depth")
        labels_every_step: ClassVar[bool] = True

        masked: bool = False
        """Leave values that are not due out of the loss, as in Eq. 5, instead of asking for EMPTY
        there."""

        mean_over_steps: bool = False
        """Divide the loss by the number of steps."""

    def __init__(self, config: Config, **upstream: object) -> None:
        super().__init__(config, **upstream)  # pyright: ignore[reportArgumentType]
        self._masked = config.masked
        self._mean_over_steps = config.mean_over_steps

    def compute(  # pyright: ignore[reportIncompatibleMethodOverride]  the head of the family
        self, readout: Callable[..., tuple[Tensor, ...]], output: LoopOutput, batch: LossBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        labels_BL, depth_BL = batch.labels_BL, batch.columns["depth"]
        others = batch.columns["factors"].unbind(-1)
        valid_BL = labels_BL != IGNORE_INDEX
        steps_R11 = torch.arange(len(output.hidden_RBLD), device=labels_BL.device).view(-1, 1, 1)
        value, *rest = readout(torch.cat(output.hidden_RBLD), factors=True)
        not_due = IGNORE_INDEX if self._masked else value.shape[-1] - 2
        due_RBL = torch.where(
            valid_BL & (depth_BL > steps_R11 + output.first_step), not_due, labels_BL
        )
        of_value_R = _sums(value, due_RBL) / batch.valid_tokens
        of_rest_R = torch.stack(
            [
                _sums(logits, torch.where(valid_BL, target_BL, IGNORE_INDEX).expand(due_RBL.shape))
                for logits, target_BL in zip(rest, others, strict=True)
            ]
        ).sum(dim=0)
        of_rest_R = of_rest_R / batch.valid_tokens
        metrics = {
            f"ce/step_{step}": ce
            for step, ce in enumerate(of_value_R.detach(), start=output.first_step)
        }
        metrics["ce/factors"] = of_rest_R.detach().mean()
        loss_R = of_value_R + of_rest_R
        return loss_R.mean() if self._mean_over_steps else loss_R.sum(), metrics


def _sums(logits_SLV: Tensor, labels_RBL: Tensor) -> Tensor:
    """Return (R,) sums of the cross entropy of R·B rows."""
    wide = torch.promote_types(logits_SLV.dtype, torch.float32)
    ce_T = F.cross_entropy(
        logits_SLV.flatten(0, 1).to(wide),
        labels_RBL.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )
    return ce_T.view(len(labels_RBL), -1).sum(dim=1)
