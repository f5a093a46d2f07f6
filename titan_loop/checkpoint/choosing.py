"""The checkpoint that a run continues from: the newest whole one, on which all ranks agree."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from titan_loop.checkpoint.folders import (
    committed_steps,
    is_committed,
    step_folder,
    unfinished_steps,
)
from titan_loop.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpointError,
    FileRecord,
    find_damage,
    read_manifest,
)
from titan_loop.errors import RunFailedError, UserError
from titan_loop.ranks import from_all_ranks, from_rank_zero, place_in

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger(__name__)

LookAt = Literal["manifest", "sizes", "hashes"]
"""Thoroughness of a check: the commit record alone, every file's size, too, or every byte."""


def newest_good(
    folder: Path,
    *,
    look_at: LookAt = "sizes",
    group: "dist.ProcessGroup | None" = None,
    wanted: Callable[[int], bool] = lambda step: True,
) -> tuple[int, dict[str, Any]] | None:
    """Return step and manifest of the newest whole checkpoint, None if none was ever committed.

    Looks only at steps for which `wanted` is true. Newer checkpoints that are not whole are skipped
    with a warning that gives the reason. The ranks of `group` share the work and agree on the
    result; without a group, this process looks alone.

    Raises `UserError` if checkpoints were committed, but none is whole: whether to start from
    scratch is the user's decision; `RunFailedError` if a node's files differ from rank 0's.
    """
    # One rank lists, so that all agree even where directory listings lag behind.
    steps, unfinished = from_rank_zero(
        group,
        lambda: (committed_steps(folder), unfinished_steps(folder)),
    )
    for step in unfinished:
        if step > max(steps, default=-1):
            logger.warning("Skipping %s: its save never finished", step_folder(folder, step))
    reasons = []
    for step in filter(wanted, reversed(steps)):
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
    checkpoint: Path, look_at: LookAt, *, group: "dist.ProcessGroup | None" = None
) -> tuple[dict[str, Any] | None, str]:
    """Return a checkpoint's manifest if it is whole, else None and the reason.

    Each rank of `group` reads a share of the files; with None, this process reads them all.
    """
    hashes = look_at == "hashes"
    manifest, reason = from_rank_zero(group, lambda: _manifest_or_reason(checkpoint))
    if manifest is None or look_at == "manifest":
        return manifest, reason
    rank, world = place_in(group)
    files: dict[str, FileRecord] = manifest["files"]
    share = dict(sorted(files.items())[rank::world])
    parts = from_all_ranks(group, lambda: find_damage(checkpoint, share, hashes=hashes))
    damage = {name: phrase for part in parts for name, phrase in part.items()}
    # One node's stale view of a shared disk must not rule out a good checkpoint.
    suspects = {name: files[name] for name in damage}
    seen = from_rank_zero(group, lambda: find_damage(checkpoint, suspects, hashes=hashes))
    if unseen := damage.keys() - seen.keys():
        raise RunFailedError(
            f"{checkpoint}: a rank finds that {damage[min(unseen)]}, and rank 0 finds it whole: "
            "that node's view of the disk is stale; start again"
        )
    return (None, "; ".join(damage.values())) if damage else (manifest, "")


def _manifest_or_reason(checkpoint: Path) -> tuple[dict[str, Any] | None, str]:
    try:
        manifest = read_manifest(checkpoint)
    except DamagedCheckpointError as error:
        return None, f"{error.path.name}: {error.reason}"
    except UserError:
        if not is_committed(checkpoint):
            return None, f"it has no {MANIFEST}"
        raise
    reason = wrong_step(checkpoint, manifest)
    return (None, reason) if reason else (manifest, "")


def wrong_step(checkpoint: Path, manifest: dict[str, Any]) -> str:
    """Return a phrase if the folder is a renamed copy of another step, else an empty one."""
    step = manifest.get("step")
    if checkpoint.name.startswith("step-") and checkpoint.name != f"step-{step}":
        return f"{MANIFEST} belongs to step {step}"
    return ""
