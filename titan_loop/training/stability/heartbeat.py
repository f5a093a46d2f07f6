"""Writes this rank's heartbeat from a thread, so that a slow disk never delays a step."""

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path

import titan_loop.compat as compat

from titan_loop.runs.heartbeats import (
    Heartbeat,
    heartbeat_file,
    read_heartbeats,
    silent_ranks,
    write_heartbeat,
)
from titan_loop.training.callback import Callback, Phase, TrainingState

logger = logging.getLogger(__name__)

_MOST_SECONDS_TO_END = 10.0
"""Longest wait at the end of a run for a heartbeat that a slow disk holds up."""


class Pulse(Callback):
    """Writes a heartbeat every `seconds` from the first step on."""

    def __init__(self, run: Path, *, rank: int, seconds: float) -> None:
        self._run, self._rank, self._seconds = run, rank, seconds
        self._step = 0
        self._phase, self._progress = "", time.time()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def on_phase(self, trainer: TrainingState, phase: Phase) -> None:
        """Note a sign of progress."""
        self.enter(trainer.step, phase)

    def enter(self, step: int, phase: Phase) -> None:
        """Let heartbeats report that `phase` of `step` began now; the first call starts them."""
        self._step, self._phase, self._progress = step, phase, time.time()
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_on, name="heartbeat", daemon=True)
            self._thread.start()

    def on_hang(self) -> None:
        """Print on rank 0 the ranks that the others wait for; may block on the disk."""
        if self._rank == 0:
            for line in silent_ranks(read_heartbeats(self._run), hung=True):
                print(f"titan-loop: {line}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Stop, and delete the file, so that a rank that ended does not look silent."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join(_MOST_SECONDS_TO_END)

    def _write_on(self) -> None:
        failed = False
        while True:
            try:
                write_heartbeat(self._run, self._now())
            except OSError as error:
                if not failed:
                    logger.warning("rank %d cannot write its heartbeat file: %s", self._rank, error)
                failed = True
            if self._ended.wait(self._seconds):
                # Here, not in `close`: a write that a slow disk holds up would bring the file back.
                with contextlib.suppress(OSError):
                    heartbeat_file(self._run, self._rank).unlink(missing_ok=True)
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
