"""Checks that a folder can be written and its disk has room; waits while the disk is full."""

import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

from titan_loop.errors import RunFailedError
from titan_loop.storage.transient import FULL_ERRNOS, retried, unwritable

logger = logging.getLogger(__name__)

WAIT_SECONDS = 600.0  # leaves half of a short queue's time limit for training
SMALL_FILES_BYTES = 1 << 20  # for a run's files besides its checkpoints
_LOOK_SECONDS = 5.0


def require_writable(folder: Path, called: str) -> None:
    """Raise an error unless a file can be created in a folder or above it; a full disk passes."""
    # Permissions are not enough: in some file systems nobody can create a file.
    try:
        retried(lambda: _write_nameless(folder, b""))
    except OSError as error:
        if error.errno not in FULL_ERRNOS:
            raise unwritable(called, error) from error


def wait_for_room(folder: Path, needed_bytes: int) -> None:
    """Wait until a folder's disk has room, at most `WAIT_SECONDS`; then warn that saves will fail.

    Raises `RunFailedError` if not even small files can be written.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    problem = ""
    while missing := _missing_bytes(folder, needed_bytes):
        if not problem:
            problem = f"{folder}: the disk is full, {missing:,} bytes more are needed"
            logger.warning("%s; make room, this start waits for %g s", problem, WAIT_SECONDS)
        if time.monotonic() >= deadline:
            if _missing_bytes(folder, 0):
                raise RunFailedError(f"{problem}; make room, then start again")
            logger.warning("%s for a checkpoint; saves will fail until there is room", problem)
            return
        time.sleep(_LOOK_SECONDS)


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
