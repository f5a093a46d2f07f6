"""Which checkpoint a run continues from: the newest that is whole, and all ranks agree on it."""

import logging
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from titan_loop.checkpoint.damage import DamagedCheckpointError
from titan_loop.checkpoint.files import find_damage
from titan_loop.checkpoint.manifest import MANIFEST, read_manifest
from titan_loop.checkpoint.retention import committed_steps, step_folder, unfinished_steps
from titan_loop.errors import UserError
from titan_loop.ranks import from_all_ranks, from_rank_zero

logger = logging.getLogger(__name__)

LookAt = Literal["manifest", "sizes", "hashes"]
"""The commit record alone; the size of every file, too; or every byte."""


def newest_good(
    folder: Path, *, look_at: LookAt = "sizes", group: dist.ProcessGroup | None = None
) -> tuple[int, dict[str, Any]] | None:
    """Return step and manifest of the newest whole checkpoint, None if none was ever committed.

    What is newer but not whole is skipped with a warning that says which and why.

    Args:
        folder: The folder of a run's checkpoints.
        look_at: How closely to look.
        group: Where ranks share the work and agree; None looks alone.

    Raises:
        UserError: Checkpoints were committed, but none is whole; starting from scratch is not ours
            to decide.
    """
    # One rank lists, so that all agree even where directory listings lag behind.
    steps, unfinished = from_rank_zero(
        group, lambda: (committed_steps(folder), unfinished_steps(folder))
    )
    for step in unfinished:
        if step > max(steps, default=-1):
            logger.warning("Skipping %s: its save never finished", step_folder(folder, step))
    reasons = []
    for step in reversed(steps):
        manifest, reason = inspect(step_folder(folder, step), look_at, group=group)
        if manifest is not None:
            return step, manifest
        logger.warning("Skipping checkpoint step-%d: %s", step, reason)
        reasons.append(f"step-{step}: {reason}")
    if reasons:
        raise UserError(
            f"no checkpoint in {folder} is usable ({'; '.join(reasons)}); repair one, or choose "
            "another dump_folder to start from scratch"
        )
    return None


def inspect(
    checkpoint: Path, look_at: LookAt, *, group: dist.ProcessGroup | None = None
) -> tuple[dict[str, Any] | None, str]:
    """Return a checkpoint's manifest if it is whole, else None and the reason.

    Args:
        checkpoint: The checkpoint's folder.
        look_at: How closely to look.
        group: Ranks that each read a share of the files; None reads them all here.
    """
    manifest, reason = from_rank_zero(group, lambda: _manifest_or_reason(checkpoint))
    if manifest is None or look_at == "manifest":
        return manifest, reason
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    share = dict(sorted(manifest["files"].items())[rank::world])
    parts = from_all_ranks(
        group, lambda: find_damage(checkpoint, share, hashes=look_at == "hashes")
    )
    damage = [phrase for part in parts for phrase in part]
    return (None, "; ".join(damage)) if damage else (manifest, "")


def _manifest_or_reason(checkpoint: Path) -> tuple[dict[str, Any] | None, str]:
    try:
        manifest = read_manifest(checkpoint)
    except DamagedCheckpointError as error:
        return None, f"{error.path.name}: {error.reason}"
    except UserError:
        if not (checkpoint / MANIFEST).exists():
            return None, f"it has no {MANIFEST}"
        raise
    step = manifest["step"]
    if checkpoint.name.startswith("step-") and checkpoint.name != f"step-{step}":
        return None, f"{MANIFEST} is that of step {step}"
    return manifest, ""
