"""One folder belongs to one process at a time: a run to its job, a source to its preparation.

The lock is the operating system's (`fcntl.lockf`). A killed process releases it at once, on every
file system that supports locks; the file that stays behind means nothing by itself. The lock
belongs to the process, so children do not hold it and may use the folder freely.
"""

import errno
import fcntl
import logging
import os
import re
import socket
import struct
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Self

from titan_loop.errors import UserError
from titan_loop.launcher import slurm_job
from titan_loop.storage.transient import retried, unwritable

logger = logging.getLogger(__name__)

_LOOK_AGAIN_SECONDS = 3.0  # a shared file system may lose a file for a moment


class LostFolder(NamedTuple):
    """How the holder of a lock lost its folder, and where that is now; None if it is gone."""

    problem: str
    folder: Path | None


LEASE_SECONDS = 120.0
"""Time in which servers of network file systems forget the locks of a host that is gone."""


_FLOCK = "hhqqi"  # Linux' struct flock: type, whence, start, length, process


def is_held(path: Path) -> bool | None:
    """Return whether another process holds a lock file; None where the system does not tell."""
    try:
        with path.open("rb") as file:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            found = fcntl.fcntl(file, fcntl.F_GETLK, asked)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK if sys.platform == "linux" else None


class FolderLock:
    """Holds a folder until `release`, the end of a `with` block, or the end of this process.

    It keeps other processes out, not other threads of this one; taking it twice in one process is
    an error that shows only when the first of the two is released, which releases both.

    Args:
        name: Name of the file in it that is locked.
        called: How messages call the folder, such as "output sources/my".
        user: How messages call the holder, such as "run".

    Raises:
        UserError: Another process holds it, or the folder may not be written.
        RunFailedError: Its disk fails.
    """

    def __init__(self, folder: Path, name: str, *, called: str, user: str) -> None:
        path = self._path = folder.absolute() / name
        try:
            retried(lambda: folder.mkdir(parents=True, exist_ok=True))
            # Not through a child: `lockf` locks belong to the process that took them.
            self._file = retried(lambda: path.open("a+", encoding="utf-8"))
        except OSError as error:
            raise unwritable(called, error) from error
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                # Some network file systems have no locks; work there is better than none.
                logger.warning(
                    "%s cannot be locked (%s): a second %s there will not be noticed",
                    path,
                    error,
                    user,
                )
                return
            if self._take_over(path):
                return
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self._file.close()
            raise UserError(
                f"{called} is in use by another {user} ({owner}); wait for it, stop it, or choose "
                f"another folder (if its host is gone for good, delete {path})"
            ) from error
        self._name_owner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Let another process have the folder."""
        with suppress(OSError):  # a full disk, which may have no room for the owner's name yet
            self._file.close()

    def lost(self) -> LostFolder | None:
        """Return how the folder was lost since it was locked, None if it was not.

        Deleting the lock's file, or renaming the folder, lets a second process lock the name.
        """
        if self._is_where_it_was():
            return None
        time.sleep(_LOOK_AGAIN_SECONDS)
        if self._is_where_it_was():
            return None
        folder = self._path.parent
        if self._path.exists():
            return LostFolder(f"{self._path} was replaced: another process may work there", None)
        # Where Linux knows the open file; renamed by another machine, it does not.
        moved = Path(f"/proc/self/fd/{self._file.fileno()}").resolve()
        if moved.exists() and os.path.samefile(moved, self._file.fileno()):
            return LostFolder(f"{folder} was renamed to {moved.parent}", moved.parent)
        if folder.is_dir():
            return LostFolder(f"{self._path} was deleted while it was in use", folder)
        return LostFolder(f"{folder} was renamed or deleted while it was in use", None)

    def _is_where_it_was(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False
        except OSError:  # a failing disk says nothing about the folder
            return True

    def _take_over(self, path: Path) -> bool:
        """Take the lock that an earlier start of this SLURM job left on a host that is gone.

        The server of a network file system may remember it for long. It is waited for, as the
        server may notice, and then replaced by another file under the same name.
        """
        job = slurm_job()
        self._file.seek(0)
        owner = self._file.read()
        host = re.match(r"process \d+ on (\S+), SLURM job (\d+),", owner)
        if job is None or host is None or host[2] != job or host[1] == socket.gethostname():
            return False
        logger.warning(
            "%s is still locked by an earlier start of this job (%s); waiting %g s for its host's "
            "lock to expire",
            path,
            owner.strip(),
            LEASE_SECONDS,
        )
        deadline = time.monotonic() + LEASE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(min(5.0, LEASE_SECONDS))
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._name_owner()
                return True
            except OSError:
                continue
        logger.warning("%s: its host did not give the lock back; it is replaced", path)
        self._file.close()
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        self._file = fresh.open("a+", encoding="utf-8")
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._name_owner()
        os.replace(fresh, path)
        return True

    def _name_owner(self) -> None:
        job = slurm_job()
        started = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            self._file.truncate(0)
            self._file.write(
                f"process {os.getpid()} on {socket.gethostname()}"
                + (f", SLURM job {job}" if job else "")
                + f", since {started}\n"
            )
            self._file.flush()
        except OSError as error:  # a full disk: the lock holds all the same
            logger.warning("%s does not say who holds it: %s", self._file.name, error)
