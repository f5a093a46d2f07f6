"""Folders of checkpoints: the steps that exist, their tags, and the deletion of one.

A folder counts once it has a manifest. Deleting starts with the manifest, so a deletion
that is killed half-way leaves something that does not count, never something that looks whole.
"""

import logging
import os
import re
import shutil
from pathlib import Path

from titan_loop.checkpoint.manifest import MANIFEST
from titan_loop.errors import UserError
from titan_loop.storage.json_files import read_json_object, write_json
from titan_loop.storage.transient import retried, unreadable

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Folder of all checkpoints inside a run directory."""

TAGS = "tags.json"

STEP_NAME = r"step-(0|[1-9][0-9]*)"
"""Pattern of the names that `step_folder` gives, and of no others such as step-006."""

_STEP = re.compile(STEP_NAME)


def step_folder(folder: Path, step: int) -> Path:
    """Return the checkpoint after `step` training steps, in a folder of checkpoints."""
    return folder / f"step-{step}"


def is_committed(checkpoint: Path) -> bool:
    """Return whether the save of a checkpoint finished, even if it was damaged since.

    Raises `OSError` if the disk hides the answer.
    """
    try:
        retried((checkpoint / MANIFEST).stat)
    except FileNotFoundError:
        return False
    return True


def committed_steps(folder: Path) -> list[int]:
    """Return the steps of all committed checkpoints in `folder`, in increasing order."""
    return [step for step, path in _step_folders(folder) if is_committed(path)]


def unfinished_steps(folder: Path) -> list[int]:
    """Return the steps of saves in `folder` that never finished or that are half deleted."""
    return [step for step, path in _step_folders(folder) if not is_committed(path)]


def discard(checkpoint: Path) -> None:
    """Delete a checkpoint, if there is one, its commit record first.

    Of a symbolic link only the link is deleted; the checkpoint that it points to stays whole.
    """
    if checkpoint.is_symlink():
        target = checkpoint.readlink()
        checkpoint.unlink()
        logger.warning("%s was a link: only the link was deleted, not %s", checkpoint, target)
        return
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    if checkpoint.exists():
        shutil.rmtree(checkpoint)


def set_aside(checkpoint: Path, why: str) -> None:
    """Rename a checkpoint to WHY-step-N, so that no policy and no reader counts it."""
    aside = checkpoint.with_name(f"{why}-{checkpoint.name}")
    while aside.exists():
        aside = aside.with_name(f"{aside.name}-again")
    checkpoint.rename(aside)
    logger.warning("Renamed %s to %s", checkpoint, aside.name)


def set_aside_newer(folder: Path, step: int) -> None:
    """Rename checkpoints newer than `step`, all damaged, so that nobody counts them."""
    for newer in committed_steps(folder):
        path = step_folder(folder, newer)
        try:
            if newer > step:
                set_aside(path, "damaged")
        except OSError as error:
            logger.warning("%s could not be renamed: %s", path, error)


def read_tags(checkpoint: Path) -> list[str]:
    """Return the names that a checkpoint was given; a named checkpoint is kept for ever."""
    path, fix = checkpoint / TAGS, "repair or delete it"
    try:
        tags = read_json_object(path, fix=fix).get("tags")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(path, error, fix) from error
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise UserError(f"{path} is damaged (tags={tags!r}); {fix}")
    return tags


def add_tag(checkpoint: Path, tag: str) -> None:
    """Give a checkpoint a name."""
    write_json(checkpoint / TAGS, {"tags": sorted({*read_tags(checkpoint), tag})})


def remove_tag(checkpoint: Path, tag: str) -> None:
    """Remove a tag; raises `UserError` if the checkpoint does not have it."""
    tags = read_tags(checkpoint)
    if tag not in tags:
        raise UserError(f"{checkpoint} has no tag {tag!r}; it has {', '.join(tags) or 'none'}")
    write_json(checkpoint / TAGS, {"tags": [known for known in tags if known != tag]})


def _step_folders(folder: Path) -> list[tuple[int, Path]]:
    def look() -> list[tuple[int, Path]]:
        # Not `Path.is_dir`: from Python 3.13 on it reports a folder on a failing disk as absent,
        # and the run would start from scratch.
        with os.scandir(folder) as entries:
            found = [(_STEP.fullmatch(entry.name), entry) for entry in entries]
            return [(int(m[1]), Path(entry.path)) for m, entry in found if m and entry.is_dir()]

    try:
        return sorted(retried(look))
    except FileNotFoundError:
        return []
