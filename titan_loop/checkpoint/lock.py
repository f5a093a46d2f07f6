"""One run directory belongs to one job at a time; rank 0 holds its lock."""

from pathlib import Path

import torch.distributed as dist

from titan_loop.errors import UserError
from titan_loop.storage.folder_lock import FolderLock

LOCK = "run.lock"


def lock_run(run: Path) -> FolderLock:
    """Lock a run directory, which is created if it is missing.

    Raises:
        UserError: Another process holds it, or the folder cannot be written.
    """
    return FolderLock(run, LOCK, called=f"dump_folder={run}", user="run")


def claim_run(run: Path) -> FolderLock | None:
    """Lock a run directory on rank 0; collective over the default group.

    Returns:
        The lock on rank 0, None elsewhere.

    Raises:
        UserError: On every rank, as `lock_run`.
    """
    lock: FolderLock | None = None
    refusal: list[UserError | None] = [None]
    if dist.get_rank() == 0:
        try:
            lock = lock_run(run)
        except UserError as error:
            refusal = [error]
    dist.broadcast_object_list(refusal, src=0)
    if refusal[0] is not None:
        raise refusal[0]
    return lock
