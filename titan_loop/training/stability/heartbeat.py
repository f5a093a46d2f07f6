"""Writes this rank's heartbeat from a thread, so that a slow disk never delays a step."""

import logging
import os
import socket
import threading
import time
from pathlib import Path

from titan_loop.runs.heartbeats import Heartbeat, heartbeat_file, write_heartbeat

logger = logging.getLogger(__name__)


class Pulse:
    """The thread; it begins at the first beat.

    Args:
        run: The run directory.
        rank: This rank.
        seconds: Time between two writings, above 0.
    """

    def __init__(self, run: Path, *, rank: int, seconds: float) -> None:
        self._run, self._rank, self._seconds = run, rank, seconds
        self._step, self._progress = 0, time.time()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self, step: int) -> None:
        """Say that a training step begins."""
        self._step, self._progress = step, time.time()
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_on, name="heartbeat", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Stop, and take the file away: a run that ended is not a rank that fell silent."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join(self._seconds)
            heartbeat_file(self._run, self._rank).unlink(missing_ok=True)

    def _write_on(self) -> None:
        failed = False
        while True:
            try:
                write_heartbeat(self._run, self._now())
            except OSError as error:
                if not failed:
                    logger.warning("rank %d has no heartbeat file: %s", self._rank, error)
                failed = True
            if self._ended.wait(self._seconds):
                return

    def _now(self) -> Heartbeat:
        return Heartbeat(
            rank=self._rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            step=self._step,
            progress=self._progress,
            written=time.time(),
            seconds=self._seconds,
        )
