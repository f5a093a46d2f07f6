"""Applies the keep policy to a run's checkpoints, after each commit."""

import logging
from collections.abc import Callable
from pathlib import Path

from titan_loop.checkpoint.best import best_step
from titan_loop.checkpoint.choosing import inspect
from titan_loop.checkpoint.retention import (
    committed_steps,
    discard,
    read_tags,
    stale_steps,
    step_folder,
    unfinished_steps,
)
from titan_loop.errors import RunFailedError, UserError

logger = logging.getLogger(__name__)


def delete_stale(
    folder: Path, *, newest: int, latest: int, every: int, in_use: Callable[[Path], bool]
) -> None:
    """Delete what the policy lets go and what never finished; a failure is logged, not raised.

    Args:
        folder: The folder of a run's checkpoints.
        newest: Step of the checkpoint just committed; later ones are another attempt's.
        latest: As for `stale_steps`.
        every: As for `stale_steps`.
        in_use: Whether a checkpoint must stay until the next commit.
    """
    steps, kept, best = [], [], None
    for step in committed_steps(folder):
        if step > newest:
            continue  # another attempt's, or found damaged: not ours to count
        checkpoint = step_folder(folder, step)
        try:
            manifest, reason = inspect(checkpoint, "manifest")
            if manifest is not None and (manifest.get("stage_end") or read_tags(checkpoint)):
                kept.append(step)
        except (UserError, RunFailedError) as error:
            manifest, reason = None, str(error)
        if manifest is None:
            logger.warning("%s is neither counted nor deleted: %s", checkpoint, reason)
        else:
            steps.append(step)
            best = best_step(manifest)
    for step in stale_steps(steps, kept=[*kept, best], latest=latest, every=every):
        if not in_use(step_folder(folder, step)):
            _delete(step_folder(folder, step), "the keep policy lets it go")
    for step in unfinished_steps(folder):
        if step < newest:
            _delete(step_folder(folder, step), "its save never finished")


def _delete(path: Path, reason: str) -> None:
    logger.info("Deleting %s: %s", path, reason)
    try:
        discard(path)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", path, error)
