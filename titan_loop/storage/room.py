"""Checks that a folder can be written and that its disk has room; a full disk is waited for."""

import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

from titan_loop.errors import RunFailedError
from titan_loop.storage.transient import FULL_ERRNOS, retried, unwritable

logger = logging.getLogger(__name__)

WAIT_SECONDS = 600.0  # half the shortest time limit of a queue is left for training
SMALL_FILES_BYTES = 1 << 20  # a run's files besides its checkpoints, until somebody looks
_LOOK_SECONDS = 5.0


def require_writable(folder: Path, called: str) -> None:
    """Try to create a file in a folder, or where it will be; a full disk passes."""
    # A folder's permissions do not tell: some file systems let nobody create a file.
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
    said = False
    while missing := missing_bytes(folder, needed_bytes):
        problem = f"{folder}: the disk is full, {missing:,} bytes more are needed"
        if time.monotonic() >= deadline:
            if missing_bytes(folder, 0):
                raise RunFailedError(f"{problem}; make room, then start again")
            logger.warning("%s for a checkpoint; saves will fail until there is room", problem)
            return
        if not said:
            logger.warning("%s; make room, this start waits for %g s", problem, WAIT_SECONDS)
            said = True
        time.sleep(_LOOK_SECONDS)
    if said:
        logger.info("%s: there is room again", folder)


def missing_bytes(folder: Path, needed_bytes: int) -> int:
    """Return the bytes to free before `needed_bytes` can be written; 0 if they fit."""
    wanted = needed_bytes + SMALL_FILES_BYTES
    try:  # a quota shows only when something is written
        existing = retried(lambda: _write_nameless(folder, bytes(SMALL_FILES_BYTES)))
    except OSError as error:
        if error.errno not in FULL_ERRNOS:
            raise unwritable(str(folder), error) from error
        return wanted
    return max(0, wanted - shutil.disk_usage(existing).free)


def _write_nameless(folder: Path, content: bytes) -> Path:
    """Write a file without a name; return the folder or the nearest one above that exists."""
    existing = folder.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    with tempfile.TemporaryFile(dir=existing) as file:
        file.write(content)
    return existing
