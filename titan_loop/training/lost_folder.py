"""A run whose folder is renamed, or whose lock is deleted, saves once more and stops.

Otherwise a second training could start in the same folder, or this one would go on in a folder that
it creates anew, without a lock and without `run.json`.
"""

from titan_loop.checkpoint.manager import LoopCheckpointManager
from titan_loop.checkpoint.retention import CHECKPOINTS
from titan_loop.errors import UserError
from titan_loop.ranks import all_ranks, from_rank_zero
from titan_loop.storage.folder_lock import FolderLock


def follow_folder(lock: FolderLock | None, checkpointer: LoopCheckpointManager) -> UserError | None:
    """Look whether the run still has its folder; collective.

    Args:
        lock: The run's lock, on rank 0.
        checkpointer: From now on saves where the folder is now.

    Returns:
        None if all is well, else the error to end with after a last save.

    Raises:
        UserError: There is nowhere to save: the folder is gone, or another training's.
    """
    lost = from_rank_zero(all_ranks(), lambda: lock and lock.lost())
    if lost is None:
        return None
    if lost.folder is None:
        raise UserError(f"{lost.problem}; stopped, nothing was saved since the last checkpoint")
    checkpointer.path = lost.folder / CHECKPOINTS
    return UserError(f"{lost.problem}; saved in {lost.folder} and stopped: start again there")
