"""Logs evaluations to the W&B run of the training they belong to, with a step axis of their own.

W&B refuses steps that go back, and a checkpoint is evaluated long after the training has logged
later ones, so evaluations have the axis `eval/step`. With `WANDB_MODE=offline` an evaluation writes
its own folder under the training's id. A failure stops nothing.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

from titan_loop.runs.run_directory import RunDirectory

logger = logging.getLogger(__name__)

STEP_AXIS = "eval/step"


class WandbLog:
    """One open W&B run; logs nothing if it cannot be opened."""

    def __init__(self, run_directory: RunDirectory) -> None:
        self._run: Any = None
        try:
            import wandb

            offline = os.environ.get("WANDB_MODE") in ("offline", "dryrun")
            # Two processes may write to one run only in shared mode, which needs the server.
            settings = {} if offline else {"mode": "shared", "x_primary": False, "x_label": "eval"}
            self._run = wandb.init(
                entity=os.environ.get("WANDB_TEAM"),
                project=os.environ.get("WANDB_PROJECT", "titan_loop"),
                id=training_run_id(run_directory),
                name=os.environ.get("WANDB_RUN_NAME", run_directory.path.name),
                dir=str(run_directory.path),
                settings=wandb.Settings(**settings),
            )
            self._run.define_metric(STEP_AXIS)
            self._run.define_metric("eval/*", step_metric=STEP_AXIS)
        except Exception as error:  # a tracking service must never stop an evaluation
            logger.error("W&B is off for this evaluation (%s)", error)

    def log(self, step: int, tokens: int, numbers: Mapping[str, float]) -> None:
        """Log one checkpoint's numbers as `eval/…`."""
        if self._run is None:
            return
        record = {f"eval/{name}": value for name, value in numbers.items()}
        try:
            self._run.log({STEP_AXIS: step, "eval/tokens": tokens, **record})
        except Exception as error:
            logger.warning("W&B is off from step %d on (%s)", step, error)
            self._run = None

    def close(self) -> None:
        """End the run, so that everything is written."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def training_run_id(run_directory: RunDirectory) -> str | None:
    """Return the id of the W&B run that the training logged to, if any."""
    if "WANDB_RUN_ID" in os.environ:
        return os.environ["WANDB_RUN_ID"]
    path = run_directory.wandb_run_id
    return path.read_text(encoding="utf-8").strip() if path.exists() else None
