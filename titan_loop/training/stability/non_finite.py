"""Counts steps without an update because a number was not finite; too many in a row end the run."""

import logging

from titan_loop.errors import NonFiniteError
from titan_loop.ranks import warn_together
from titan_loop.training.callback import Callback, TrainingState
from titan_loop.training.verdict import TrainedStep

logger = logging.getLogger(__name__)


class NonFiniteSteps(Callback):
    """Counts them and raises `NonFiniteError` at the `most`-th in a row."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_a_row = 0

    def on_verdict(self, trainer: TrainingState, trained: TrainedStep, *, updated: bool) -> None:
        """Count the step."""
        self._in_a_row = 0 if updated else self._in_a_row + 1
        if updated:
            return
        windows = trained.windows
        where = f"step {trained.step} (windows {windows.start} to {windows.stop - 1})"
        warn_together(
            logger,
            "%s: loss %g or gradient norm %g is not finite on some rank; update skipped (%d of %d "
            "in a row)",
            where,
            float(trained.loss),
            float(trained.grad_norm),
            self._in_a_row,
            self._most,
        )
        if self._in_a_row >= self._most:
            raise NonFiniteError(
                f"stopped at {where}: {self._in_a_row} steps in a row had a non-finite loss or "
                "gradient; restart from the last checkpoint with a lower learning rate or fewer "
                "recurrent steps"
            )
