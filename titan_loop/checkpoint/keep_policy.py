"""The keep policy: which checkpoints of a run stay, and the deletion of the others."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_loop.checkpoint.best import BEST, best_step
from titan_loop.checkpoint.choosing import inspect
from titan_loop.checkpoint.folders import (
    committed_steps,
    discard,
    read_tags,
    step_folder,
    unfinished_steps,
)
from titan_loop.errors import RunFailedError, UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """The newest checkpoints stay, and those with a reason to stay for ever."""

    latest: int
    """Number of newest checkpoints; 0 keeps all."""

    every: int = 0
    """Steps that are multiples of this stay for ever; 0 for none."""

    def reasons(
        self,
        step: int,
        manifest: Mapping[str, Any],
        *,
        best: int | None,
        tags: Collection[str] = (),
    ) -> list[str]:
        """Return why a checkpoint stays for ever, a phrase each; empty if it may go."""
        reasons = [f"every {self.every}"] if self.every and step % self.every == 0 else []
        reasons += ["stage end"] if manifest.get("stage_end") else []
        reasons += [BEST] if step == best else []
        return [*reasons, *(f"tag {tag}" for tag in tags)]

    def stale(self, reasons: Mapping[int, Collection[str]]) -> list[int]:
        """Return the steps to delete, in increasing order, given why each committed one stays."""
        if self.latest == 0:
            return []
        return [step for step in sorted(reasons)[: -self.latest] if not reasons[step]]


def delete_stale(
    folder: Path, policy: KeepPolicy, *, newest: int, in_use: Callable[[Path], bool]
) -> None:
    """Delete stale checkpoints and unfinished saves; log failures instead of raising them.

    Args:
        newest: Step of the checkpoint just committed; later ones are another attempt's.
    """
    manifests, tags = {}, {}
    for step in committed_steps(folder):
        if step > newest:
            continue  # another attempt's, or found damaged: not ours to count
        checkpoint = step_folder(folder, step)
        try:
            manifest, reason = inspect(checkpoint, "manifest")
            tags[step] = read_tags(checkpoint)
        except (UserError, RunFailedError) as error:
            manifest, reason = None, str(error)
        if manifest is None:
            logger.warning("%s is neither counted nor deleted: %s", checkpoint, reason)
        else:
            manifests[step] = manifest
    best = best_step(manifests[max(manifests)]) if manifests else None
    reasons = {
        step: policy.reasons(step, manifest, best=best, tags=tags[step])
        for step, manifest in manifests.items()
    }
    for step in policy.stale(reasons):
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
