"""Lists and describes the checkpoints of a run, whole, damaged, set aside or unfinished."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_loop.checkpoint.choosing import wrong_step
from titan_loop.checkpoint.folders import STEP_NAME, is_committed, read_tags
from titan_loop.checkpoint.keep_policy import KeepPolicy, newest_best_step
from titan_loop.checkpoint.manifest import MANIFEST, TABLE, find_damage, read_manifest
from titan_loop.errors import RunFailedError, UserError

KEEP_ALL = KeepPolicy()

_NAME = re.compile(rf"(damaged-|rewound-)?{STEP_NAME}")


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """One folder: a checkpoint, or the remains of one.

    Attributes:
        manifest: The commit record, if there is a readable one.
        faults: Damage, a phrase each; empty for a good checkpoint and for an unfinished save.
        kept: Reasons why the keep policy never deletes it.
    """

    path: Path
    step: int
    manifest: dict[str, Any] | None
    faults: list[str]
    kept: list[str]
    size_bytes: int

    @property
    def committed(self) -> bool:
        """Whether its save finished, even if it was damaged since."""
        return is_committed(self.path)


def list_checkpoints(
    folder: Path, *, hashes: bool = False, policy: KeepPolicy = KEEP_ALL
) -> list[ListedCheckpoint]:
    """Return all checkpoints in `folder` by increasing step, set aside and unfinished ones too."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    listed = [look_at(path, hashes=hashes, policy=policy) for path in found]
    return sorted(listed, key=lambda checkpoint: (checkpoint.step, checkpoint.path.name))


def look_at(path: Path, *, hashes: bool = False, policy: KeepPolicy = KEEP_ALL) -> ListedCheckpoint:
    """Describe one checkpoint's folder; raise `UserError` if it is missing or its name is wrong."""
    match = _NAME.fullmatch(path.name)
    if match is None or not path.is_dir():
        raise UserError(f"{path} is not a checkpoint; give its folder step-N")
    step, manifest, best = int(match[2]), None, None
    faults: list[str] = []
    tags: list[str] = []
    try:
        if is_committed(path):
            manifest = read_manifest(path)
            faults = _find_faults(path, manifest, hashes=hashes)
            best = newest_best_step(path.parent)
        tags = read_tags(path)
    except (UserError, RunFailedError) as error:
        faults.append(str(error))
    if manifest is None or match[1] is not None:  # the keep policy ignores it
        policy, best = KEEP_ALL, None
    kept = policy.reasons(step, manifest or {}, best=best, tags=tags)
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return ListedCheckpoint(path, step, manifest, faults, kept, size)


def _find_faults(checkpoint: Path, manifest: dict[str, Any], *, hashes: bool) -> list[str]:
    faults = [reason] if (reason := wrong_step(checkpoint, manifest)) else []
    faults += find_damage(checkpoint, manifest["files"], hashes=hashes).values()
    if hashes and not faults:
        from titan_loop.checkpoint.tensor_table import read_table  # imports torch

        stored = read_table(checkpoint).storage_data
        unknown = {info.relative_path for info in stored.values()} - manifest["files"].keys()
        faults += [f"{name} is in {TABLE}, but not in {MANIFEST}" for name in sorted(unknown)]
    return faults
