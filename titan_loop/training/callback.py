"""Callbacks: behaviour added at fixed points of a run, without a change to the trainer.

    load_state_dict ─► on_train_start
    ─► a step: plan, on_gradients, judge, on_update ─► (a step later) on_verdict
    ─► record ─► on_step_end ─► may_save ─► state_dict ─► the next step

A run has a callback for skipped steps, the recipe's, and the evaluations that the start appends.
They see the run through `TrainingState`.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
from torch import Tensor
from torchtitan.config.configs import TrainingConfig
from torchtitan.distributed import ParallelDims

from titan_loop.checkpoint.manager import LoopCheckpointManager
from titan_loop.data.load.batches import GlobalBatchLoader
from titan_loop.models.context import WindowShare
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import ModelOptions
from titan_loop.objectives.streamed_loss import StreamedLoss
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.metrics_processor import LoopMetricsProcessor
from titan_loop.training.optimizers.container import LoopOptimizers
from titan_loop.training.step_plan import StepPlan
from titan_loop.training.stop_request import StopListener
from titan_loop.training.verdict import StepVerdict, TrainedStep


class RunSettings(Protocol):
    """The fields of a run's config that callbacks read."""

    dump_folder: str
    training: TrainingConfig
    recurrence: RecurrenceConfig
    dataloader: GlobalBatchLoader.Config
    model: ModelOptions
    loss: StreamedLoss.Config


class TrainingState(Protocol):
    """A trainer, as its callbacks see it; in long work they call `stop_listener.progress()`."""

    step: int
    tokens: int
    plan: StepPlan
    callbacks: "list[Callback]"
    device: torch.device
    parallel_dims: ParallelDims
    window_share: WindowShare | None
    dataloader: GlobalBatchLoader
    optimizers: LoopOptimizers
    checkpointer: LoopCheckpointManager
    metrics_processor: LoopMetricsProcessor
    stop_listener: StopListener

    @property
    def config(self) -> RunSettings:
        """The run's settings; callbacks must not change them."""
        ...

    @property
    def model(self) -> LoopDecoder:
        """The model, as it is distributed."""
        ...

    @property
    def at_last_step(self) -> bool:
        """Whether no further step follows in this start."""
        ...

    def train_context(self) -> AbstractContextManager[None]:
        """Return the context that every forward pass runs in."""
        ...


class Callback:
    """Hooks that do nothing; subclasses override some.

    Every rank calls every hook of every callback in the same order, so a hook may communicate. An
    exception ends the run. Between `on_train_start` and `on_step_end` a hook must not wait for the
    device, unless the step is logged.
    """

    def on_train_start(self, trainer: TrainingState) -> None:
        """Run after a checkpoint is loaded, before the first step."""

    def plan(self, trainer: TrainingState, plan: StepPlan) -> StepPlan:
        """Return the plan of the step that begins, the same on all ranks."""
        return plan

    def on_gradients(self, trainer: TrainingState) -> None:
        """Run when a step's gradients are complete, sharded and not clipped yet."""

    def judge(self, trainer: TrainingState, loss: Tensor, grad_norm: Tensor) -> Tensor | None:
        """Return whether this rank agrees to the update, a scalar bool on the device.

        If any rank disagrees, all skip the update. None abstains. `loss` is this rank's share;
        `grad_norm` is the norm over all ranks before clipping.
        """

    def on_update(self, trainer: TrainingState, verdict: StepVerdict) -> None:
        """Run after an update or a skipped one; so far only the device knows which."""

    def on_verdict(self, trainer: TrainingState, trained: TrainedStep, *, updated: bool) -> None:
        """Run when the host learns a step's verdict, up to a step later, in order of steps."""

    def record(self, trainer: TrainingState) -> Mapping[str, Any]:
        """Return entries of a logged step's record in `metrics.jsonl`, equal on all ranks."""
        return {}

    def on_step_end(self, trainer: TrainingState, metrics: Mapping[str, Any]) -> None:
        """Run after a training step, even a skipped one; not timed as training.

        `metrics` is the step's record as in `metrics.jsonl`, empty on steps that are not logged.
        """

    def may_save(self) -> bool:
        """Return whether a checkpoint may be saved after this step."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values for the trainer's saved state, under a key that only it uses."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from the trainer's saved state, which may lack this callback's key."""
