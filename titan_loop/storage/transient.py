"""Reads that fail for a moment, as on a shared file system that fails over, are tried again.

    read ─► EIO, ESTALE, …, or fewer bytes than the file has ─► wait, open again, read again
         ─► `ATTEMPTS` in a row ─► the error, which is the machine's

Every retry is logged and counted; `metrics.jsonl` has the count as `io_retries`. A caller opens the
file inside of what it passes on: a stale handle stays stale.
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
    errno.ESHUTDOWN,
    errno.ESTALE,
    errno.ETIMEDOUT,
}

_retries = 0


class ShortReadError(OSError):
    """A file gave fewer bytes than it should have.

    Args:
        path: The file.
        reason: What was missing, as a phrase.
    """

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(errno.EIO, reason, str(path))


def retried(read: Callable[[], T]) -> T:
    """Return what `read` returns, which is called again after a transient error.

    Raises:
        OSError: Any other one at once, a transient one of the last attempt.
    """
    for attempt in range(1, ATTEMPTS):
        try:
            return read()
        except OSError as error:
            if error.errno not in TRANSIENT_ERRNOS:
                raise
            wait = WAIT_SECONDS * 2 ** (attempt - 1)
            logger.warning(
                "%s (attempt %d of %d); reading again in %g s", error, attempt, ATTEMPTS, wait
            )
        count_retry()
        time.sleep(wait)
    return read()


def count_retry() -> None:
    """Count a read that a caller tries again by itself."""
    global _retries
    _retries += 1


def retries() -> int:
    """Return the number of reads that this process tried again."""
    return _retries


def unreadable(path: str | Path, error: OSError, fix: str) -> UserError | RunFailedError:
    """Return what to raise for a file that cannot be read: the user's error, or the machine's.

    Args:
        path: The file.
        error: What the system said, in the end.
        fix: Remedy, as a phrase.
    """
    kind = UserError if error.errno in USER_ERRNOS else RunFailedError
    return kind(f"{path} cannot be read ({error.strerror}); {fix}")
