"""Retries for a disk that fails for a moment, as when a shared file system fails over.

    read ─► EIO, ESTALE, …, or fewer bytes than the file has ─► wait, open again, read again
         ─► `ATTEMPTS` failures in a row ─► the error is raised

Every retry is logged.
"""

import errno
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from titan_loop.errors import USER_ERRNOS, RunFailedError, UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS = 5
WAIT_SECONDS = 0.5
"""Wait before the second attempt; it doubles each time, to 7.5 s in total."""

TRANSIENT_ERRNOS = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EIO,
    errno.EREMOTEIO,
    errno.EROFS,  # a file system that fails over may be read-only for a while
    errno.ESHUTDOWN,
    errno.ESTALE,
    errno.ETIMEDOUT,
}

FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT}


class ShortReadError(OSError):
    """A file gave fewer bytes than it should have."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(errno.EIO, reason, str(path))


def retried(act: Callable[[], T]) -> T:
    """Call `act`, again after a transient error, and return its result.

    `act` must open its file itself, since a stale handle stays stale.
    """
    for attempt in range(ATTEMPTS - 1):
        try:
            return act()
        except OSError as error:
            if error.errno not in TRANSIENT_ERRNOS:
                raise
            wait = WAIT_SECONDS * 2**attempt
            logger.warning("%s; trying again in %g s", error, wait)
        time.sleep(wait)
    return act()


def unreadable(path: str | Path, error: OSError, fix: str) -> UserError | RunFailedError:
    """Return the error for a file that cannot be read: the user's, or the machine's."""
    return disk_error(error, f"{path} cannot be read ({error.strerror}); {fix}")


def unwritable(called: str, error: OSError) -> UserError | RunFailedError:
    """Return the error for a folder that cannot be written, as `unreadable` does."""
    problem = f"{called} cannot be written ({error.strerror or error})"
    if error.errno == errno.ENOENT:  # nothing can be created in some folders, such as /proc
        return UserError(f"{problem}; choose a folder you can write to")
    return disk_error(error, f"{problem}; make room there, or choose a folder you can write to")


def disk_error(error: OSError, message: str) -> UserError | RunFailedError:
    """Return a `UserError`, or a `RunFailedError`, after which a chain of jobs goes on."""
    return (UserError if error.errno in USER_ERRNOS else RunFailedError)(message)
