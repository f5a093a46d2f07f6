"""A run whose folder is renamed, or whose lock is deleted, saves once more and stops.

Otherwise a second training could start in the same folder, or this one would go on in a folder that
it creates anew, without a lock and without `run.json`.
"""

import threading
from contextlib import suppress

from titan_loop.checkpoint.folders import CHECKPOINTS
from titan_loop.checkpoint.manager import LoopCheckpointManager
from titan_loop.errors import UserError
from titan_loop.ranks import all_ranks, from_rank_zero
from titan_loop.storage.folder_lock import FolderLock

LOOK_SECONDS = 5.0


class FolderWatch:
    """Looks from a thread whether a run still has its folder, until `end`.

    A file system whose server stalls would stall every training step that looks for itself.

    Args:
        lock: The run's lock.

    Attributes:
        lost: Result of the newest look.
    """

    def __init__(self, lock: FolderLock) -> None:
        self.lost = False
        self._lock, self._ended = lock, threading.Event()
        threading.Thread(target=self._look_on, name="folder-watch", daemon=True).start()

    def end(self) -> None:
        """Stop looking; a look that waits for the disk is not waited for."""
        self._ended.set()

    def _look_on(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            with suppress(ValueError):  # released meanwhile
                self.lost = self._lock.lost() is not None


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
