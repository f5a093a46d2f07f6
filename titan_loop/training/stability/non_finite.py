"""Counts steps skipped because a number was not finite; too many in a row end the run."""

import logging
from collections.abc import Mapping
from typing import Any

from titan_loop.errors import NonFiniteError
from titan_loop.ranks import warn_together
from titan_loop.training.callback import Callback, TrainingState
from titan_loop.training.verdict import TrainedStep

logger = logging.getLogger(__name__)


class NonFiniteSteps(Callback):
    """Raises `NonFiniteError` at the `most`-th skipped step in a row."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_a_row = 0

    def on_verdict(self, trainer: TrainingState, trained: TrainedStep, *, updated: bool) -> None:
        """Count a skipped step; an update resets the count."""
        self._in_a_row = 0 if updated else self._in_a_row + 1
        if updated:
            return
        windows = trained.windows
        where = f"step {trained.step} (windows {windows.start} to {windows.stop - 1})"
        numbers = f"loss {float(trained.loss):g} or gradient norm {float(trained.grad_norm):g}"
        counted = f"{self._in_a_row} of {self._most} in a row"
        message = "%s: %s is not finite on some rank; update skipped (%s)"
        warn_together(logger, message, where, numbers, counted)
        if self._in_a_row >= self._most:
            problem = f"{self._in_a_row} steps in a row had a non-finite loss or gradient"
            fix = "restart from the last checkpoint with a lower learning rate or a smaller R"
            raise NonFiniteError(f"stopped at {where}: {problem}; {fix}")

    def state_dict(self) -> dict[str, Any]:
        """Return the count, so that restarts between skipped steps do not hide a dead run."""
        return {"non_finite_in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the count; older checkpoints have none."""
        self._in_a_row = state.get("non_finite_in_a_row", 0)
