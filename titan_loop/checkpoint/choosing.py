"""Good checkpoints: the one that a run continues from, and a list of all of them.

`newest_good` chooses, and all ranks agree; `look_at` and `list_checkpoints` describe.
"""

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from titan_loop.checkpoint.best import BEST, newest_best_step
from titan_loop.checkpoint.manifest import (
    MANIFEST,
    TABLE,
    DamagedCheckpointError,
    FileRecord,
    find_damage,
    read_manifest,
)
from titan_loop.checkpoint.retention import (
    STEP_NAME,
    committed_steps,
    is_committed,
    read_tags,
    renamed_checkpoints,
    step_folder,
    unfinished_steps,
)
from titan_loop.errors import RunFailedError, UserError
from titan_loop.ranks import from_all_ranks, from_rank_zero, place_in

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger(__name__)

SECOND_LOOK_SECONDS = 3.0
"""Time before damage is looked for again, longer than network file systems keep attributes."""

LookAt = Literal["manifest", "sizes", "hashes"]
"""How closely to look: at the commit record, also at the size of every file, or at every byte."""


def newest_good(
    folder: Path,
    *,
    look_at: LookAt = "sizes",
    group: "dist.ProcessGroup | None" = None,
    wanted: Callable[[int], bool] = lambda step: True,
) -> tuple[int, dict[str, Any]] | None:
    """Return step and manifest of the newest whole checkpoint, None if none was ever committed.

    A newer checkpoint that is not whole is skipped with a warning that says why.

    Args:
        folder: The folder of a run's checkpoints.
        look_at: See `LookAt`.
        group: Where ranks share the work and agree; None looks alone.
        wanted: Which steps to choose from.

    Raises:
        UserError: Checkpoints were committed, but none is whole or all were renamed; whether to
            start from scratch is the user's decision.
        RunFailedError: A disk fails, or a node sees other files than rank 0.
    """
    # One rank lists, so that all agree even where directory listings lag behind.
    steps, unfinished, renamed = from_rank_zero(
        group,
        lambda: (committed_steps(folder), unfinished_steps(folder), renamed_checkpoints(folder)),
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
    if renamed:
        raise UserError(
            f"{folder} holds only renamed checkpoints ({', '.join(renamed)}); rename each to "
            "step-N, N the step in its manifest, or choose another dump_folder to start from "
            "scratch"
        )
    return None


def inspect(
    checkpoint: Path, look_at: LookAt, *, group: "dist.ProcessGroup | None" = None
) -> tuple[dict[str, Any] | None, str]:
    """Return a checkpoint's manifest if it is whole, else None and the reason.

    Args:
        checkpoint: The checkpoint's folder.
        look_at: See `LookAt`.
        group: Ranks that each read a share of the files; None reads them all here.
    """
    hashes = look_at == "hashes"
    manifest, reason = from_rank_zero(
        group, lambda: _manifest_or_reason(checkpoint, twice=group is not None)
    )
    if manifest is None or look_at == "manifest":
        return manifest, reason
    rank, world = place_in(group)
    files: dict[str, FileRecord] = manifest["files"]
    share = dict(sorted(files.items())[rank::world])
    parts = from_all_ranks(group, lambda: find_damage(checkpoint, share, hashes=hashes))
    damage = {name: phrase for part in parts for name, phrase in part.items()}
    if damage and group is not None:
        names = damage if rank == 0 else parts[rank]
        suspects = {name: files[name] for name in names}
        damage = _seen_twice(checkpoint, suspects, hashes=hashes, group=group)
    return (None, "; ".join(damage.values())) if damage else (manifest, "")


def _seen_twice(
    checkpoint: Path, suspects: dict[str, FileRecord], *, hashes: bool, group: "dist.ProcessGroup"
) -> dict[str, str]:
    """Look again, a while later: rank 0 decides, and the others must have come to see the same.

    One node's stale view of a shared disk must not have a good checkpoint set aside.

    Args:
        checkpoint: The checkpoint's folder.
        suspects: On rank 0, all files that some rank called damaged; elsewhere, this rank's own.
        hashes: As for `find_damage`.
        group: All ranks.

    Returns:
        What rank 0 finds damaged now.

    Raises:
        RunFailedError: Another rank still finds damage in what rank 0 finds whole.
    """
    time.sleep(SECOND_LOOK_SECONDS)
    confirmed, *others = from_all_ranks(
        group, lambda: find_damage(checkpoint, suspects, hashes=hashes)
    )
    for rank, part in enumerate(others, start=1):
        if unconfirmed := part.keys() - confirmed.keys():
            raise RunFailedError(
                f"{checkpoint}: rank {rank} finds that {part[min(unconfirmed)]}, rank 0 finds it "
                "whole: that node's view of the disk is stale or wrong; start again"
            )
    if not confirmed and place_in(group)[0] == 0:
        logger.warning("%s seemed damaged (%s) and is whole", checkpoint, ", ".join(suspects))
    return confirmed


def _manifest_or_reason(
    checkpoint: Path, *, twice: bool = False
) -> tuple[dict[str, Any] | None, str]:
    try:
        manifest = read_manifest(checkpoint)
    except DamagedCheckpointError as error:
        if twice:
            time.sleep(SECOND_LOOK_SECONDS)
            return _manifest_or_reason(checkpoint)
        return None, f"{error.path.name}: {error.reason}"
    except UserError:
        if not is_committed(checkpoint):
            return None, f"it has no {MANIFEST}"
        raise
    reason = _wrong_step(checkpoint, manifest)
    return (None, reason) if reason else (manifest, "")


def _wrong_step(checkpoint: Path, manifest: dict[str, Any]) -> str:
    """Return a phrase if the folder was copied or renamed from another step; else nothing."""
    step = manifest.get("step")
    if checkpoint.name.startswith("step-") and checkpoint.name != f"step-{step}":
        return f"{MANIFEST} is that of step {step}"
    return ""


_NAME = re.compile(rf"(damaged-|rewound-)?{STEP_NAME}")


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """One folder: a checkpoint, or what is left of one."""

    path: Path
    step: int
    manifest: dict[str, Any] | None
    """The commit record, if there is a readable one."""

    faults: list[str]
    """Faults found; empty if it is good, or an unfinished save."""

    kept: list[str]
    """Why the keep policy never deletes it."""

    size_bytes: int
    """Total size of its files."""

    @property
    def committed(self) -> bool:
        """Whether its save finished, whatever happened to it since."""
        return is_committed(self.path)

    @property
    def good(self) -> bool:
        """Whether a run may continue from it."""
        return self.committed and not self.faults and self.path.name == f"step-{self.step}"


def list_checkpoints(
    folder: Path, *, hashes: bool = False, keep_every: int = 0
) -> list[ListedCheckpoint]:
    """Return all checkpoints in `folder` by increasing step, set aside and unfinished ones too.

    Args:
        folder: The folder of a run's checkpoints.
        hashes: Whether to read every file; sizes are always compared.
        keep_every: The run's `checkpoint.keep_every`.
    """
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    found = [path for path in named if path.is_dir() or _leads_nowhere(path)]
    listed = [look_at(path, hashes=hashes, keep_every=keep_every) for path in found]
    return sorted(listed, key=lambda checkpoint: (checkpoint.step, checkpoint.path.name))


def look_at(path: Path, *, hashes: bool = False, keep_every: int = 0) -> ListedCheckpoint:
    """Describe one checkpoint's folder; arguments as for `list_checkpoints`.

    Raises:
        UserError: The folder does not exist, or is not named like a checkpoint.
    """
    match = _NAME.fullmatch(path.name)
    if match is None or not (path.is_dir() or _leads_nowhere(path)):
        raise UserError(f"{path} is not a checkpoint; give its folder step-N")
    step = int(match[2])
    if not path.is_dir():
        fault = f"it is a link to {path.readlink()}, which is not there"
        return ListedCheckpoint(path, step, None, [fault], [], 0)
    manifest = None
    faults: list[str] = []
    kept: list[str] = []
    if is_committed(path):
        try:
            manifest = read_manifest(path)
            if keep_every and step % keep_every == 0 and match[1] is None:
                kept.append(f"every {keep_every}")
            if manifest.get("stage_end"):
                kept.append("stage end")
            if newest_best_step(path.parent) == step and match[1] is None:
                kept.append(BEST)
            faults = find_faults(path, manifest, hashes=hashes)
        except (UserError, RunFailedError) as error:
            faults = [str(error)]
    try:
        kept += [f"tag {tag}" for tag in read_tags(path)]
    except UserError as error:
        faults.append(str(error))
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return ListedCheckpoint(path, step, manifest, faults, kept, size)


def _leads_nowhere(path: Path) -> bool:
    """Return whether it is a link without a target, such as into an archive that is not mounted."""
    return path.is_symlink() and not path.exists()


def find_faults(checkpoint: Path, manifest: dict[str, Any], *, hashes: bool) -> list[str]:
    """Return everything wrong with a committed checkpoint, a phrase each.

    Args:
        checkpoint: Its folder.
        manifest: Its commit record.
        hashes: Whether to read the files, the table of entries among them; else sizes only.
    """
    wrong_step = _wrong_step(checkpoint, manifest)
    faults = [wrong_step] if wrong_step else []
    faults += find_damage(checkpoint, manifest["files"], hashes=hashes).values()
    if hashes and (checkpoint / TABLE).exists():  # an older version wrote none
        from titan_loop.checkpoint.tensor_table import read_table  # imports torch

        try:
            stored = read_table(checkpoint).storage_data
            unknown = {info.relative_path for info in stored.values()} - manifest["files"].keys()
            faults += [f"{name} is read from, but not in {MANIFEST}" for name in sorted(unknown)]
        except UserError as error:
            faults.append(str(error))
    return faults


def why_not_delete(path: Path, *, keep_every: int = 0) -> list[str]:
    """Return the reasons to keep a checkpoint; empty if it may be deleted.

    Args:
        path: Its folder.
        keep_every: The run's `checkpoint.keep_every`.

    Raises:
        UserError: The folder is not a checkpoint.
    """
    checkpoint = look_at(path, keep_every=keep_every)
    if not checkpoint.committed:
        return []
    good = [other.step for other in list_checkpoints(path.parent) if other.good]
    newest = checkpoint.good and checkpoint.step == max(good)
    return [*checkpoint.kept, *(["it is the newest good one"] if newest else [])]
