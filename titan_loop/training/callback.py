"""What a recipe passes into training: behaviour at fixed points, without the trainer knowing it.

Evaluation, plots and watchers live above `training` in the import order; they reach into a run only
through this protocol.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from titan_loop.training.trainer import LoopTrainer


class Callback(Protocol):
    """Called by the trainer on every rank, in the order in which the callbacks were given.

    Every rank takes part, so a callback may communicate. What it raises ends the run. Time spent in
    it does not count towards tokens per second.
    """

    def on_train_start(self, trainer: "LoopTrainer") -> None:
        """Run after a checkpoint was loaded, before the first step."""
        ...

    def on_step_end(self, trainer: "LoopTrainer", metrics: Mapping[str, Any]) -> None:
        """Run after a training step, skipped updates included.

        Args:
            trainer: The trainer; `trainer.step` is the step that ended.
            metrics: The step's record as in `metrics.jsonl`, empty on steps that are not logged.
        """
        ...

    def on_train_end(self, trainer: "LoopTrainer") -> None:
        """Run after the last step and the last checkpoint, not after a failure."""
        ...
