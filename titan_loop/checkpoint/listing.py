"""What is in a folder of checkpoints: which are good, what is wrong with others, what is kept."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_loop.checkpoint.files import find_damage
from titan_loop.checkpoint.manifest import MANIFEST, read_manifest
from titan_loop.checkpoint.retention import read_tags
from titan_loop.checkpoint.safe_reading import read_metadata
from titan_loop.errors import UserError

_NAME = re.compile(r"(damaged-)?step-(\d+)")


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """One folder: a checkpoint, or what is left of one."""

    path: Path
    step: int
    manifest: dict[str, Any] | None
    """The commit record, if there is a readable one."""

    faults: list[str]
    """What is wrong with it; empty if it is good, or was never committed."""

    kept: list[str]
    """Why the keep policy never deletes it."""

    size_bytes: int
    """Of all files in it."""

    @property
    def committed(self) -> bool:
        """Whether its save finished, whatever happened to it since."""
        return (self.path / MANIFEST).exists()

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
    found = [path for path in folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    listed = [look_at(path, hashes=hashes, keep_every=keep_every) for path in found]
    return sorted(listed, key=lambda checkpoint: (checkpoint.step, checkpoint.path.name))


def look_at(path: Path, *, hashes: bool = False, keep_every: int = 0) -> ListedCheckpoint:
    """Describe one checkpoint's folder; arguments as for `list_checkpoints`.

    Raises:
        UserError: The folder does not exist, or is not named like a checkpoint.
    """
    match = _NAME.fullmatch(path.name)
    if match is None or not path.is_dir():
        raise UserError(f"{path} is no checkpoint; give the folder step-N of one")
    step = int(match[2])
    manifest = None
    faults: list[str] = []
    kept: list[str] = []
    if (path / MANIFEST).exists():
        try:
            manifest = read_manifest(path)
            if keep_every and step % keep_every == 0 and match[1] is None:
                kept.append(f"every {keep_every}")
            if manifest.get("stage_end"):
                kept.append("stage end")
            faults = find_faults(path, manifest, hashes=hashes)
        except UserError as error:
            faults = [str(error)]
    try:
        kept += [f"tag {tag}" for tag in read_tags(path)]
    except UserError as error:
        faults.append(str(error))
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return ListedCheckpoint(path, step, manifest, faults, kept, size)


def find_faults(checkpoint: Path, manifest: dict[str, Any], *, hashes: bool) -> list[str]:
    """Return everything wrong with the files of a committed checkpoint, a phrase each.

    Args:
        checkpoint: Its folder.
        manifest: Its commit record.
        hashes: Whether to read the files, DCP's metadata among them; else sizes only.
    """
    faults = find_damage(checkpoint, manifest["files"], hashes=hashes)
    if hashes:
        try:
            stored = read_metadata(checkpoint).storage_data
            unknown = {info.relative_path for info in stored.values()} - manifest["files"].keys()
            faults += [f"{name} is read from, but not in {MANIFEST}" for name in sorted(unknown)]
        except UserError as error:
            faults.append(str(error))
    return faults


def why_not_delete(path: Path, *, keep_every: int = 0) -> list[str]:
    """Return the reasons to keep a checkpoint; empty if nobody should miss it.

    Args:
        path: Its folder.
        keep_every: The run's `checkpoint.keep_every`.

    Raises:
        UserError: It is no checkpoint.
    """
    checkpoint = look_at(path, keep_every=keep_every)
    if not checkpoint.committed:
        return []
    good = [other.step for other in list_checkpoints(path.parent) if other.good]
    newest = checkpoint.good and checkpoint.step == max(good)
    return [*checkpoint.kept, *(["it is the newest good one"] if newest else [])]
