"""A run whose folder is renamed, or whose lock is deleted, saves once more and stops.

Otherwise a second run could start in the same folder, or this run would create the folder again and
go on there without a lock and without `run.json`.
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
    """Checks from a thread whether a run still has its folder, from `start` to `end`.

    A check within a training step would block on a stalled file server. Only rank 0 has a `lock`.
    """

    def __init__(self, lock: FolderLock | None) -> None:
        self.lost = False
        self._error: UserError | None = None
        self._lock, self._ended = lock, threading.Event()

    def start(self) -> None:
        """Start the thread."""
        if self._lock is not None:
            threading.Thread(target=self._look_on, name="folder-watch", daemon=True).start()

    def end(self) -> None:
        """Stop looking, without waiting for a check that hangs on the disk."""
        self._ended.set()

    def follow(self, checkpointer: LoopCheckpointManager) -> UserError | None:
        """Let a run that lost its folder save in the new place; collective.

        Returns the error to end with after that save; None if all is well. Raises `UserError` if
        there is nowhere to save.
        """
        if self._error is not None:
            return self._error  # a second call: the new path is set
        lost = from_rank_zero(all_ranks(), lambda: self._lock and self._lock.lost())
        if lost is None:
            return None
        if lost.folder is None:
            raise UserError(f"{lost.problem}; stopped, nothing was saved since the last checkpoint")
        checkpointer.path = lost.folder / CHECKPOINTS
        done = f"saved in {lost.folder} and stopped: start again there"
        self._error = UserError(f"{lost.problem}; {done}")
        return self._error

    def _look_on(self) -> None:
        assert self._lock is not None
        while not self._ended.wait(LOOK_SECONDS):
            with suppress(ValueError):  # the lock was released meanwhile
                self.lost = self._lock.lost() is not None
