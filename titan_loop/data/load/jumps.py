"""Ranges of global windows that a job leaves out after a rewind."""

from collections.abc import Iterable, Sequence

import numpy as np

Ranges = Sequence[tuple[int, int]]
"""Ranges (first, stop) of windows, in order, that neither overlap nor touch."""


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges in order, with those that overlap or touch made one."""
    result: list[tuple[int, int]] = []
    for first, stop in sorted(ranges):
        if result and first <= result[-1][1]:
            result[-1] = result[-1][0], max(stop, result[-1][1])
        else:
            result.append((first, stop))
    return result


def next_windows(first: int, count: int, jumped: Ranges) -> np.ndarray:
    """Return the next `count` windows from `first` on that are in no jumped range (int64)."""
    parts: list[np.ndarray] = []
    for start, stop in jumped:
        if stop <= first or not count:
            continue
        before = min(count, max(0, start - first))
        parts.append(np.arange(first, first + before))
        count -= before
        first = max(first + before, stop) if count else first
    return np.concatenate([*parts, np.arange(first, first + count)])


def jumped_before(window: int, jumped: Ranges) -> int:
    """Return the number of windows below `window` that were jumped."""
    return sum(max(0, min(stop, window) - first) for first, stop in jumped)
