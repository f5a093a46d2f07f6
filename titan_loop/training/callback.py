"""Callbacks: behaviour at fixed points of a run, which a recipe passes into training.

Evaluation, plots and watchers live above `training` in the import order. They reach into a run
through `TrainingState` only, and `LoopTrainer` knows none of them.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
from torchtitan.config.configs import TrainingConfig
from torchtitan.distributed import ParallelDims

from titan_loop.data.load.batches import GlobalBatchLoader
from titan_loop.models.context import WindowShare
from titan_loop.models.decoder import LoopDecoder
from titan_loop.training.metrics import LoopMetricsProcessor
from titan_loop.training.optimizer import LoopOptimizers
from titan_loop.training.stop_request import StopListener


class RunSettings(Protocol):
    """The part of a run's config that callbacks read."""

    dump_folder: str
    training: TrainingConfig
    dataloader: GlobalBatchLoader.Config


class TrainingState(Protocol):
    """What a callback sees of the trainer.

    Attributes:
        step: Training steps done.
        tokens: Global tokens consumed, an integer independent of the number of ranks.
        device: Where the model computes.
        parallel_dims: Meshes.
        window_share: The part of every window this rank computes; None for all of it.
        dataloader: Reads the training data.
        optimizers: Update the model.
        metrics_processor: Writes numbers to TensorBoard and W&B.
        stop_listener: Wants to hear of progress during long work.
    """

    step: int
    tokens: int
    device: torch.device
    parallel_dims: ParallelDims
    window_share: WindowShare | None
    dataloader: GlobalBatchLoader
    optimizers: LoopOptimizers
    metrics_processor: LoopMetricsProcessor
    stop_listener: StopListener

    def note_held_out_loss(self, nats_per_token: float, measured_on: str) -> None:
        """Take the held-out loss of the weights as they are, equal on all ranks.

        Args:
            nats_per_token: The loss.
            measured_on: Which text it is of; losses of the same text are compared.
        """
        ...

    @property
    def config(self) -> RunSettings:
        """The run's settings; not to be changed."""
        ...

    @property
    def recurrent_steps(self) -> int:
        """R of the newest training step; before the first, that of the next."""
        ...

    @property
    def model(self) -> LoopDecoder:
        """The model that is being trained, distributed as it is."""
        ...

    @property
    def at_last_step(self) -> bool:
        """Whether this start trains no further step."""
        ...

    def train_context(self) -> AbstractContextManager[None]:
        """Return the context that every forward pass runs in."""
        ...


class Callback(Protocol):
    """Called by the trainer on every rank, in the order in which the callbacks were given.

    Every rank takes part, so a callback may communicate. What it raises ends the run. Time spent in
    it does not count towards tokens per second.
    """

    def on_train_start(self, trainer: TrainingState) -> None:
        """Run after a checkpoint was loaded, before the first step."""
        ...

    def on_step_end(self, trainer: TrainingState, metrics: Mapping[str, Any]) -> None:
        """Run after a training step, skipped updates included.

        Args:
            trainer: The trainer; `trainer.step` is the step that ended.
            metrics: The step's record as in `metrics.jsonl`, empty on steps that are not logged.
        """
        ...

    def on_train_end(self, trainer: TrainingState) -> None:
        """Run after the last step and the last checkpoint, not after a failure."""
        ...
