"""Locks that give a folder to one process: a run to its job, a source to its preparation.

The operating system holds the lock (`fcntl.lockf`, which NFS and Lustre know), so a killed process
releases it at once and the file that stays behind means nothing. Child processes do not hold it and
may use the folder.
"""

import errno
import fcntl
import logging
import os
import re
import socket
import struct
import sys
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from pathlib import Path

from titan_loop.errors import UserError
from titan_loop.launcher import slurm_job
from titan_loop.storage.transient import retried, unwritable

logger = logging.getLogger(__name__)

_FLOCK = "hhqqi"  # Linux' struct flock: type, whence, start, length, process


def is_held(path: Path) -> bool | None:
    """Return whether another process holds a lock file; None if the system cannot tell."""
    try:
        with path.open("rb") as file:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            found = fcntl.fcntl(file, fcntl.F_GETLK, asked)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK if sys.platform == "linux" else None


class FolderLock(AbstractContextManager["FolderLock"]):
    """Holds a folder until `release`, the end of a `with` block, or the end of this process.

    It does not keep out other threads. Take it once per process: one release frees all. Messages
    name the folder as `called`, such as "output sources/my", and its holder as `user`, such as
    "run"; `name` is the locked file in the folder.
    """

    def __init__(self, folder: Path, name: str, *, called: str, user: str) -> None:
        path = folder.absolute() / name
        try:
            retried(lambda: folder.mkdir(parents=True, exist_ok=True))
            self._file = retried(lambda: path.open("a+", encoding="utf-8"))
        except OSError as error:
            raise unwritable(called, error) from error
        try:
            self._lock()
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                # Some network file systems have no locks; work there is better than none.
                logger.warning(
                    f"{path} cannot be locked ({error}): a second {user} there will not be noticed"
                )
                return
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self._file.close()
            if not _is_this_job_elsewhere(owner):
                raise UserError(
                    f"{called} is in use by another {user} ({owner}); wait for it, stop it, or "
                    f"choose another folder (if its host is gone for good, delete {path})"
                ) from error
            # SLURM starts a job again only after its end, but a server of network file systems
            # may remember the locks of a host that is gone for hours.
            logger.warning(f"{path} was left by an earlier start of this job ({owner}): replaced")
            fresh = path.with_name(f".{path.name}.{os.getpid()}")
            self._file = fresh.open("a+", encoding="utf-8")
            self._lock()
            os.replace(fresh, path)

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Let another process have the folder."""
        with suppress(OSError):  # closing writes the owner's name, which a full disk may refuse
            self._file.close()

    def _lock(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        job = f", SLURM job {slurm_job()}" if slurm_job() else ""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            self._file.truncate(0)
            self._file.write(
                f"process {os.getpid()} on {socket.gethostname()}{job}, since {since}\n"
            )
            self._file.flush()
        except OSError as error:  # a full disk: the lock holds all the same
            logger.warning("%s does not say who holds it: %s", self._file.name, error)


def _is_this_job_elsewhere(owner: str) -> bool:
    """Return whether an owner's line names this SLURM job on another host."""
    found = re.match(r"process \d+ on (\S+), SLURM job (\d+),", owner)
    return found is not None and found[2] == slurm_job() and found[1] != socket.gethostname()
