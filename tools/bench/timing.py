"""Timing steps in turn, so that all see the same machine, and how the results are printed."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import titan_loop.compat  # noqa: F401  isort: skip  (before any torchtitan module)
from torchtitan.tools import utils as titan_utils

T = TypeVar("T")

clock = time.perf_counter
"""What `now` reads; a program may set another one."""


def now() -> float:
    """Return the time in seconds at which the device has done its work."""
    titan_utils.device_module.synchronize()
    return clock()


def seconds_of(step: Callable[[], object]) -> float:
    """Time one call, to the end of the device's work."""
    began = now()
    step()
    return now() - began


def in_turn(steps: Sequence[Callable[[], object]], *, pairs: int, warmup: int) -> list[list[float]]:
    """Time the steps in turn, A B C A B C; return the seconds of every step."""
    timed = [lambda step=step: seconds_of(step) for step in steps]
    return results_in_turn(timed, pairs=pairs, warmup=warmup)


def results_in_turn(
    steps: Sequence[Callable[[], T]], *, pairs: int, warmup: int = 1
) -> list[list[T]]:
    """Call the steps in turn, A B C A B C; return the results of every step.

    Args:
        steps: What to call.
        pairs: Number of rounds that count.
        warmup: Number of rounds before them.
    """
    for _ in range(warmup):
        for step in steps:
            step()
    rounds = [[step() for step in steps] for _ in range(pairs)]
    return [list(column) for column in zip(*rounds, strict=True)]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return the median and the range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Return the ratio of every round."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]
