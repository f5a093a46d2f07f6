"""Writes this rank's heartbeat from a thread, so that a slow disk never delays a step."""

import logging
import os
import socket
import threading
import time
from pathlib import Path

import titan_loop.compat as compat

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
        self._step = 0
        self._phase, self._progress = "", time.time()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self, step: int) -> None:
        """Say that a training step begins."""
        self._step = step
        self.enter("reading data")
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_on, name="heartbeat", daemon=True)
            self._thread.start()

    def enter(self, phase: str) -> None:
        """Say that a part of the step begins."""
        self._phase, self._progress = phase, time.time()

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
        now = time.time()
        stays = now - self._progress >= self._seconds  # asking takes a tenth of a second on gloo
        return Heartbeat(
            rank=self._rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            step=self._step,
            phase=self._phase,
            progress=self._progress,
            collective=compat.oldest_collective() if stays else "",
            written=now,
            seconds=self._seconds,
        )
