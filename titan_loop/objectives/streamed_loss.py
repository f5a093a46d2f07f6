"""The base of objectives that read out every recurrent step through the streamed head.

A subclass writes `compute`, and its config lists its requirements on a run. Every sum is divided by
the valid target tokens of the *global* batch, so the contributions of micro-batches and
data-parallel ranks add up.

Shape suffixes: R recurrent steps, B batch, L sequence, D width.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import spmd_types as spmd
import torch
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import CompileConfig
from torchtitan.config.configs import ParallelismConfig

from titan_loop.errors import Refusal
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.exit_gate import Trainable
from titan_loop.models.initialisation import local_part
from titan_loop.models.output import Collect, LoopOutput
from titan_loop.models.readout import LMHead
from titan_loop.objectives.exit_distribution import exit_entropy_nats, exit_pmf, mean_exit_step


class LossBatch(NamedTuple):
    """The targets of one micro-batch, or of this rank's part of it.

    Attributes:
        valid_tokens: N, the valid tokens of the global batch, which divides every sum.
        columns: Columns that the loader declares for the loss, by name. A term made from a value
            per window must be spread over its tokens: ranks that share a window add their losses.
        labelled_T: Indices of all labelled ones of the B·L tokens, if few are: the head's `rows_T`.
    """

    labels_BL: Tensor
    valid_tokens: Tensor | float
    columns: Mapping[str, Tensor] = {}
    labelled_T: Tensor | None = None


class StreamedLoss(ChunkedLossWrapper):
    """A torchtitan loss over a `LoopOutput`; subclasses write `compute`.

    It is a `ChunkedLossWrapper` because the Trainer gives the head to no other loss. The chunking
    itself is the head's: see `LMHead.Config.chunk_tokens`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        """An objective's requirements on the run that trains it."""

        schedules: ClassVar[tuple[str, ...]] = ()
        """Schedules that `set_schedules` receives: fields of this config, or else of the run."""

        columns: ClassVar[tuple[str, ...]] = ()
        """Columns of the batch that the objective reads; the loader must declare them."""

        reads_tokens: ClassVar[bool] = False
        """Whether token ids and positions are among the columns, as `input` and `positions`."""

        labels_every_step: ClassVar[bool] = False
        """Whether steps have labels of their own, so that R must reach the deepest example."""

        one_depth: ClassVar[bool] = False
        """Whether R must be the same in all steps of a run."""

        # Meaningless fields of the base class: not settable, so they cannot be ignored silently.
        num_chunks: int = field(default=1, init=False)
        loss_fn: BaseLoss.Config = field(default_factory=CrossEntropyLoss.Config, init=False)

        def collect(self, *, exit_gate: bool) -> Collect:
            """Return the steps whose states the objective reads."""
            return "all"

        def aux(self) -> Mapping[str, str]:
            """Return the `LoopOutput.aux` entries it needs: name → the setting that needs it."""
            return {}

        def refusals(
            self, *, trainable: Trainable, exit_gate: bool, fewest_steps: int
        ) -> Iterator[Refusal]:
            """Refuse a run with R ≥ `fewest_steps` that this objective cannot train."""
            if trainable == "exit_gate":
                yield Refusal(
                    "trainable",
                    f"trainable=exit_gate with loss={type(self).__qualname__}: only "
                    "AdaptiveGateLoss trains the gate alone",
                    "set loss to AdaptiveGateLoss.Config()",
                )

        def parallelism_refusals(self, parallelism: ParallelismConfig) -> Iterator[Refusal]:
            """Refuse degrees of parallelism that this objective does not support."""
            yield from ()

        def model_refusals(self, model: LoopDecoder.Config) -> Iterator[Refusal]:
            """Refuse a model that this objective cannot train."""
            yield from ()

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        super().__init__(config)

    def set_schedules(self, values: Mapping[str, float]) -> None:
        """Take the step's value of each of `Config.schedules`."""

    def warning(self, metrics: Mapping[str, Any]) -> str | None:
        """Return one line if a step's metrics, *global* means, show that training went wrong."""
        return None

    def summary(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the objective's part of the console line, from global means."""
        ce = [value for key, value in metrics.items() if key.startswith("ce/step_")]
        parts = [f"CE {ce[0]:.3f}→{ce[-1]:.3f}"] if len(ce) > 1 else []
        if "exit/mean_step" in metrics:
            parts.append(f"exit {metrics['exit/mean_step']:.2f}")
        return parts

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]  a LoopOutput, not a tensor
        self,
        pred: LoopOutput,
        labels: Tensor,
        global_valid_tokens: Tensor | float | None = None,
        *,
        columns: Mapping[str, Tensor] | None = None,
        labelled_T: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and the metrics of one micro-batch.

        Without `global_valid_tokens` they are sums instead of means. Without valid tokens, loss,
        metrics and gradients are 0.
        """
        readout: Any = self.lm_head
        assert readout is not None, "set_lm_head was not called"
        valid_tokens = 1.0 if global_valid_tokens is None else global_valid_tokens
        type_checking = spmd.is_type_checking()
        # As upstream: the checker cannot follow a sum over tokens divided by a replicated scalar.
        with spmd.no_typecheck():
            if isinstance(valid_tokens, Tensor):
                valid_tokens = valid_tokens.clamp(min=1)  # a fully masked batch: 0 / 1, not 0 / 0
            loss, metrics = self.compute(
                readout, pred, LossBatch(labels, valid_tokens, columns or {}, labelled_T)
            )
            if type_checking:
                spmd.assert_type(loss, {"dp": spmd.P, "cp": spmd.P, "tp": spmd.I})
        return loss, metrics

    @abstractmethod
    def compute(
        self, readout: LMHead, output: LoopOutput, batch: LossBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar loss, at least fp32, and its metrics.

        Metrics are detached scalars with the same names on every rank; each is logged under its
        name, as the sum over micro-batches and ranks.
        """


def stack_exit_logits(exit_logit_RBL: Sequence[Tensor]) -> Tensor:
    """Stack the gate logits into one plain (R, B, L) tensor.

    Under tensor parallelism they are replicated, and so are their gradients: CE_r is equal on all
    ranks.
    """
    return torch.stack([local_part(logit_BL) for logit_BL in exit_logit_RBL])


def token_mean(value: Tensor, labels_BL: Tensor, valid_tokens: Tensor | float) -> Tensor:
    """Return this call's share of the mean over valid tokens: (…, B, L) → (…)."""
    return torch.where(labels_BL != IGNORE_INDEX, value, 0.0).sum(dim=(-2, -1)) / valid_tokens


@torch.no_grad()
def exit_metrics(
    ce_RBL: Tensor, exit_logit_RBL: Tensor, labels_BL: Tensor, valid_tokens: Tensor | float
) -> dict[str, Tensor]:
    """Return the metrics of a model with a gate, this call's shares of means over the global batch.

    | key | meaning |
    |---|---|
    | `ce/step_1` … `ce/step_R` | CE_r, nats per token |
    | `exit/pmf_1` … `exit/pmf_R` | p_r |
    | `exit/entropy_nats` | H(p) |
    | `exit/mean_step` | Σ_r r p_r |
    """
    pmf_R = token_mean(exit_pmf(exit_logit_RBL), labels_BL, valid_tokens)
    ce_R = token_mean(ce_RBL, labels_BL, valid_tokens)
    metrics = {f"ce/step_{r}": ce for r, ce in enumerate(ce_R, start=1)}
    metrics |= {f"exit/pmf_{r}": probability for r, probability in enumerate(pmf_R, start=1)}
    entropy_BL, step_BL = exit_entropy_nats(exit_logit_RBL), mean_exit_step(exit_logit_RBL)
    metrics["exit/entropy_nats"] = token_mean(entropy_BL, labels_BL, valid_tokens)
    metrics["exit/mean_step"] = token_mean(step_BL, labels_BL, valid_tokens)
    return metrics
