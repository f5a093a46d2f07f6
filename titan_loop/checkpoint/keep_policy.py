"""The keep policy: reasons for a run's checkpoints to stay, and the deletion of the others."""

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
    """The newest checkpoints stay, and so do others that have a reason to stay for ever.

    Its fields are options of the checkpoint manager by the same names.

    Attributes:
        keep_latest_k: Number of newest checkpoints; 0 keeps all.
        keep_every: Steps that are multiples of this stay for ever; 0 turns this off.
    """

    keep_latest_k: int = 0
    keep_every: int = 0

    def reasons(
        self,
        step: int,
        manifest: Mapping[str, Any],
        *,
        best: int | None,
        tags: Collection[str] = (),
    ) -> list[str]:
        """Return the reasons why a checkpoint stays for ever, a phrase each; empty if it may go."""
        reasons = (
            [f"every {self.keep_every}"] if self.keep_every and step % self.keep_every == 0 else []
        )
        reasons += ["stage end"] if manifest.get("stage_end") else []
        reasons += [BEST] if step == best else []
        return [*reasons, *(f"tag {tag}" for tag in tags)]

    def stale(
        self, manifests: Mapping[int, Mapping[str, Any]], tags: Mapping[int, Collection[str]]
    ) -> list[int]:
        """Return the steps to delete, in increasing order, given all manifests and tags by step."""
        best = best_step(manifests[max(manifests)]) if manifests else None
        oldest = sorted(manifests)[: -self.keep_latest_k] if self.keep_latest_k else []
        return [
            step
            for step in oldest
            if not self.reasons(step, manifests[step], best=best, tags=tags.get(step, ()))
        ]


def delete_stale(
    folder: Path, policy: KeepPolicy, *, newest: int, in_use: Callable[[Path], bool] | None = None
) -> None:
    """Delete stale checkpoints and unfinished saves; log failures instead of raising them.

    Checkpoints later than `newest`, the one just committed, belong to another attempt or were found
    damaged: they are neither counted nor deleted. A checkpoint that is `in_use` stays for now.
    """
    manifests, tags = {}, {}
    for step in committed_steps(folder):
        if step > newest:
            continue
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
    for step in policy.stale(manifests, tags):
        checkpoint = step_folder(folder, step)
        if in_use is None or not in_use(checkpoint):
            _delete(checkpoint, "the keep policy lets it go")
    for step in unfinished_steps(folder):
        if step < newest:
            _delete(step_folder(folder, step), "its save never finished")


def _delete(path: Path, reason: str) -> None:
    logger.info("Deleting %s: %s", path, reason)
    try:
        discard(path)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", path, error)
