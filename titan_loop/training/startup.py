"""Seconds from a command to the end of its first training step, by part.

    imports       from the process's start; none for later stages, which share it
    checks        of every stage's config and data
    build         process group, data, model, optimiser
    checkpoint    found, verified and loaded
    callbacks     their `on_train_start`, such as reading held-out windows
    first_step    compilation included

Under a launcher each rank counts from its own start. Rank 0's numbers are logged and kept in
`run.json`, beside the start they belong to.
"""

import logging
import os
import time

import torch.distributed as dist

from titan_loop.runs.run_directory import RunDirectory

logger = logging.getLogger(__name__)

FIRST_STEP = "first_step"


class StartupClock:
    """Measures the parts of one start, each from the end of the one before.

    Args:
        since_process_start: Whether the first part begins with the process, as far as the system
            tells (Linux does), or now.
    """

    def __init__(self, *, since_process_start: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        age = process_age_seconds() if since_process_start else 0.0
        self._last = time.perf_counter() - age

    @property
    def finished(self) -> bool:
        """Whether the first step is done: later marks have no effect."""
        return FIRST_STEP in self.seconds

    def mark(self, part: str) -> None:
        """End `part` now."""
        if not self.finished:
            now = time.perf_counter()
            self.seconds[part] = now - self._last
            self._last = now

    def finish(self, run_directory: RunDirectory) -> None:
        """End the last part, `first_step`; rank 0 logs and records all. Later calls are void."""
        if self.finished:
            return
        self.mark(FIRST_STEP)
        if dist.get_rank() == 0:
            logger.info("%s", self.line())
            run_directory.record_startup(self.seconds)

    def line(self) -> str:
        """Return the parts and their sum as one line for the log."""
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items())
        return f"first step done {sum(self.seconds.values()):.1f} s after the start: {parts}"


def process_age_seconds() -> float:
    """Return how long this process has existed; 0 where `/proc` does not tell."""
    try:
        with open("/proc/self/stat") as file:
            after_name = file.read().rpartition(")")[2].split()
        started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
