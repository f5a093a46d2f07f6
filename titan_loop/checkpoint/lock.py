"""One run directory belongs to one job at a time.

The lock is the operating system's (`fcntl`), held by rank 0. A killed process releases it at once,
on every file system that supports locks; the file that stays behind means nothing by itself.
"""

import errno
import fcntl
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

import torch.distributed as dist
from torchtitan.tools.logging import logger

from titan_loop.errors import UserError

LOCK = "run.lock"


def claim_run(run: Path) -> "RunLock | None":
    """Lock a run directory on rank 0; collective over the default group.

    Returns:
        The lock on rank 0, None elsewhere.

    Raises:
        UserError: On every rank, as `RunLock`.
    """
    lock: RunLock | None = None
    refusal: list[UserError | None] = [None]
    if dist.get_rank() == 0:
        try:
            lock = RunLock(run)
        except UserError as error:
            refusal = [error]
    dist.broadcast_object_list(refusal, src=0)
    if refusal[0] is not None:
        raise refusal[0]
    return lock


class RunLock:
    """Holds a run directory until `release`, or until this process ends.

    Args:
        run: The run directory; created if it is missing.

    Raises:
        UserError: Another process holds it, or the folder cannot be written.
    """

    def __init__(self, run: Path) -> None:
        path = run / LOCK
        try:
            run.mkdir(parents=True, exist_ok=True)
            # Not through a child: `lockf` locks belong to the process that took them.
            self._file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"dump_folder={run} cannot be written ({error.strerror}); choose a folder you can "
                "write to"
            ) from error
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                # Some network file systems have no locks; a run there is better than none.
                logger.warning(
                    "%s cannot be locked (%s): a second run in it will not be noticed", path, error
                )
                return
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self._file.close()
            raise UserError(
                f"dump_folder={run} is in use by another run ({owner}); wait for it, stop it, or "
                f"choose another folder (if its host is gone for good, delete {path})"
            ) from error
        self._name_owner()

    def release(self) -> None:
        """Let another run have the directory."""
        self._file.close()

    def _name_owner(self) -> None:
        job = os.environ.get("SLURM_JOB_ID")
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
