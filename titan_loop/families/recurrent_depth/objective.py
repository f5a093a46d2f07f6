"""Cross entropy with smoothed labels, of the last recurrent step.

    L = 1/N Σ_i [ (1 − ε) CE_i − ε/V Σ_v log p_i(v) ]

over the N labels i. Logits are not computed in chunks: in windows with one example each few
positions have a label, and only these get logits.

Source: the code of recurrent-depth transformers (arXiv 2604.07822), which smooths labels by 0.1 for
systematic generalisation; the paper does not mention it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge, Lt
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import CompileConfig
from torchtitan.config.configs import ParallelismConfig

from titan_loop.errors import Refusal
from titan_loop.models.output import Collect, LoopOutput
from titan_loop.models.readout import LMHead
from titan_loop.objectives.streamed_loss import LossBatch, StreamedLoss


class SmoothedLoss(StreamedLoss):
    """The smoothed loss; its metric `ce/step_R` is the cross entropy without smoothing."""

    @dataclass(kw_only=True, slots=True)
    class Config(StreamedLoss.Config):
        """The degree of smoothing."""

        label_smoothing: Annotated[float, Ge(0), Lt(1)] = 0.1
        """ε, the share of the target that is spread evenly over all tokens."""

        def collect(self, *, exit_gate: bool) -> Collect:
            """Ask for the last state only."""
            return "last"

        def parallelism_refusals(self, parallelism: ParallelismConfig) -> Iterator[Refusal]:
            """Refuse to split the vocabulary, or a window's labels, over ranks."""
            for name in ("tensor_parallel_degree", "context_parallel_degree"):
                if (degree := getattr(parallelism, name)) > 1:
                    problem = "does not work with loss=SmoothedLoss"
                    yield Refusal.of(f"parallelism.{name}", degree, problem, "leave it at 1")

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        super().__init__(config, compile_config=compile_config)
        self.label_smoothing = config.label_smoothing

    def compute(
        self, readout: LMHead, output: LoopOutput, batch: LossBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and the metrics of one micro-batch."""
        through = partial(_smoothed, batch, self.label_smoothing)
        loss, ce = readout(output.hidden_RBLD[-1:], through=through)
        step = output.first_step + len(output.hidden_RBLD) - 1
        return loss / batch.valid_tokens, {f"ce/step_{step}": ce / batch.valid_tokens}


def _smoothed(
    batch: LossBatch,
    smoothing: float,
    weight_VD: Tensor,
    states: tuple[Tensor, ...],
    head: LMHead,
) -> tuple[Tensor, Tensor]:
    """Return the sums of the loss and of the cross entropy, the latter detached."""
    state_TD, labels_T = states[-1].flatten(0, 1), batch.labels_BL.flatten()
    if batch.labelled_T is not None:
        state_TD, labels_T = state_TD[batch.labelled_T], labels_T[batch.labelled_T]
    logits_TV = F.linear(state_TD, weight_VD)
    log_p_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)).log_softmax(-1)
    ce = F.nll_loss(log_p_TV, labels_T, ignore_index=IGNORE_INDEX, reduction="sum")
    even_T = torch.where(labels_T == IGNORE_INDEX, 0.0, -log_p_TV.mean(-1))
    return (1 - smoothing) * ce + smoothing * even_T.sum(), ce.detach()
