"""Checks that a folder can be written and its disk has room."""

import logging
import os
import shutil
import tempfile
from pathlib import Path

from titan_loop.errors import RunFailedError
from titan_loop.storage.transient import FULL_ERRNOS, retried, unwritable

logger = logging.getLogger(__name__)

SMALL_FILES_BYTES = 1 << 20  # for a run's files besides its checkpoints


def require_writable(folder: Path, called: str) -> None:
    """Raise an error unless a file can be created in a folder or above it; a full disk passes."""
    # Permissions are not enough: in some file systems nobody can create a file.
    try:
        retried(lambda: _write_nameless(folder, b""))
    except OSError as error:
        if error.errno not in FULL_ERRNOS:
            raise unwritable(called, error) from error


def require_room(folder: Path, needed_bytes: int) -> None:
    """Raise `RunFailedError` if not even small files fit; warn if `needed_bytes` do not."""
    missing = _missing_bytes(folder, needed_bytes)
    if not missing:
        return
    problem = f"{folder}: the disk is full, {missing:,} bytes more are needed"
    if _missing_bytes(folder, 0):
        raise RunFailedError(f"{problem}; make room, then start again")
    logger.warning("%s for a checkpoint; saves will fail until there is room", problem)


def _missing_bytes(folder: Path, needed_bytes: int) -> int:
    wanted = needed_bytes + SMALL_FILES_BYTES
    try:  # a quota shows only when something is written
        existing = retried(lambda: _write_nameless(folder, bytes(SMALL_FILES_BYTES)))
    except OSError as error:
        if error.errno not in FULL_ERRNOS:
            raise unwritable(str(folder), error) from error
        return wanted
    return max(0, wanted - shutil.disk_usage(existing).free)


def _write_nameless(folder: Path, content: bytes) -> Path:
    """Write a temporary file in the folder, or the nearest one above that exists; return that."""
    existing = folder.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    with tempfile.TemporaryFile(dir=existing) as file:
        file.write(content)
    return existing
