"""Checkpoints that stay: reasons of the keep policy, the best one, and the deletion of the others.

Every manifest of a run with `--best` names the best checkpoint so far (`best`: its step, its loss
and the text it was measured on), so a run that continues from any of them knows it. The path
RUN/checkpoints/best stands for the one that the newest manifest names.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from titan_loop.checkpoint.choosing import inspect
from titan_loop.checkpoint.folders import (
    committed_steps,
    discard,
    is_committed,
    read_tags,
    step_folder,
    unfinished_steps,
)
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.errors import RunFailedError, UserError

logger = logging.getLogger(__name__)

BEST = "best"


class Best(TypedDict):
    """A checkpoint and its held-out loss, in nats per token."""

    step: int
    held_out_loss: float
    measured_on: str


def best_with(best: Best | None, measured: Best | None, step: int) -> Best | None:
    """Return the best checkpoint once `step` is saved.

    `measured` counts only if it is of that step; a loss on other text is not compared with it.
    """
    if measured is None or measured["step"] != step:
        return best
    if best is None or best["measured_on"] != measured["measured_on"]:
        return measured
    return measured if measured["held_out_loss"] < best["held_out_loss"] else best


def newest_best_step(folder: Path) -> int | None:
    """Return the best step that the newest readable manifest in a folder of checkpoints names."""
    for step in reversed(committed_steps(folder)):
        try:
            return _best_step(read_manifest(step_folder(folder, step)))
        except (UserError, RunFailedError):
            continue
    return None


def named_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a path names; `best` gives its step-N, which must exist."""
    if path.name != BEST or path.exists():
        return path
    step = newest_best_step(path.parent)
    if step is None:
        raise UserError(
            f"{path}: no checkpoint there names the best one; train with --best, or give a step-N"
        )
    checkpoint = step_folder(path.parent, step)
    if not is_committed(checkpoint):
        raise UserError(f"{path} is {checkpoint.name}, which is gone; give another step-N")
    return checkpoint


def _best_step(manifest: Mapping[str, Any]) -> int | None:
    best = manifest.get(BEST)
    return None if best is None else best["step"]


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """The newest checkpoints stay, and so do others that have a reason to stay for ever.

    Its fields are options of the checkpoint manager by the same names.

    Attributes:
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
        by_number = self.keep_every and step % self.keep_every == 0
        reasons = [f"every {self.keep_every}"] if by_number else []
        reasons += ["stage end"] if manifest.get("stage_end") else []
        reasons += [BEST] if step == best else []
        return [*reasons, *(f"tag {tag}" for tag in tags)]

    def stale(
        self, manifests: Mapping[int, Mapping[str, Any]], tags: Mapping[int, Collection[str]]
    ) -> list[int]:
        """Return the steps to delete, in increasing order, given all manifests and tags by step."""
        best = _best_step(manifests[max(manifests)]) if manifests else None
        oldest = sorted(manifests)[: -self.keep_latest_k] if self.keep_latest_k else []
        return [
            step
            for step in oldest
            if not self.reasons(step, manifests[step], best=best, tags=tags.get(step, ()))
        ]


def delete_stale(
    folder: Path, policy: KeepPolicy, *, newest: int, in_use: Callable[[Path], bool]
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
    doomed = dict.fromkeys(policy.stale(manifests, tags), "the keep policy lets it go")
    unfinished = (step for step in unfinished_steps(folder) if step < newest)
    doomed |= dict.fromkeys(unfinished, "its save never finished")
    for step, reason in doomed.items():
        checkpoint = step_folder(folder, step)
        if in_use(checkpoint):
            continue
        logger.info("Deleting %s: %s", checkpoint, reason)
        try:
            discard(checkpoint)
        except OSError as error:
            logger.warning("%s could not be deleted: %s", checkpoint, error)
