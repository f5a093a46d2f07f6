"""The checkpoint of a run with the lowest held-out loss, which `--best` keeps.

Every manifest of such a run names the best checkpoint so far (`best`: its step, its loss and the
text it was measured on), so a run that continues from any of them knows it. The path
RUN/checkpoints/best stands for the one that the newest manifest names.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from titan_loop.checkpoint.folders import committed_steps, is_committed, step_folder
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.errors import RunFailedError, UserError

BEST = "best"


class Best(TypedDict):
    """A checkpoint and its held-out loss, in nats per token."""

    step: int
    held_out_loss: float
    measured_on: str


def better(best: Best | None, measured: Best | None) -> Best | None:
    """Return the better checkpoint; a loss measured on other text no longer counts."""
    if best is None or measured is None or best["measured_on"] != measured["measured_on"]:
        return measured or best
    return measured if measured["held_out_loss"] < best["held_out_loss"] else best


def best_with(best: Best | None, measured: Best | None, step: int) -> Best | None:
    """Return the best checkpoint once `step` is saved; `measured` counts only if of that step."""
    return better(best, measured) if measured is not None and measured["step"] == step else best


def best_step(manifest: Mapping[str, Any]) -> int | None:
    """Return the step of the best checkpoint so far; None in a run that keeps none."""
    best = manifest.get(BEST)
    return None if best is None else best["step"]


def newest_best_step(folder: Path) -> int | None:
    """Return the best step that the newest readable manifest in a folder of checkpoints names."""
    for step in reversed(committed_steps(folder)):
        try:
            return best_step(read_manifest(step_folder(folder, step)))
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
