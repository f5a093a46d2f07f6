"""Seconds from a command to the end of its first training step, by part.

imports       from the start of the process; in the first stage only
checks        config and data of every stage
build         process group, data, model, optimiser
checkpoint    finding, verifying and loading one
callbacks     their `on_train_start`, such as reading held-out windows
first_step    compilation included
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

    With `since_process_start` the first part begins with the process, if its age can be read.
    """

    def __init__(self, *, since_process_start: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter() - (_process_age_seconds() if since_process_start else 0.0)

    @property
    def finished(self) -> bool:
        """Whether the first step is done; later marks have no effect."""
        return FIRST_STEP in self.seconds

    def mark(self, part: str) -> None:
        """End `part` now."""
        if not self.finished:
            now = time.perf_counter()
            self.seconds[part] = now - self._last
            self._last = now

    def finish(self, run_directory: RunDirectory) -> None:
        """End the last part, `first_step`; rank 0 logs and records all. Later calls do nothing."""
        if self.finished:
            return
        self.mark(FIRST_STEP)
        if dist.get_rank() == 0:
            parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items())
            total = sum(self.seconds.values())
            logger.info("first step done %.1f s after the start: %s", total, parts)
            run_directory.record_startup(self.seconds)


def _process_age_seconds() -> float:
    """Return the age of this process; 0 where `/proc` does not have it."""
    try:
        with open("/proc/self/stat") as file:
            after_name = file.read().rpartition(")")[2].split()
        started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
