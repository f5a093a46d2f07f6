"""How much a call raises the peak memory of a process of its own."""

import ctypes
import sys
from collections.abc import Callable
from typing import Any

from tests.support.multiprocess import preloaded_context
from titan_loop import compat

_M_MMAP_THRESHOLD = -3
"""Of glibc's mallopt: larger blocks go back to the system when they are freed."""


def peak_growth(first: Callable[[], object], then: Callable[[], object]) -> int:
    """Return the bytes by which `then` raises the peak, after `first`, which allocates once.

    Both are called in a forked process, so they must be picklable.
    """
    context = preloaded_context()
    peaks = context.SimpleQueue()
    child = context.Process(target=_measure, args=(first, then, peaks))
    child.start()
    child.join()
    assert child.exitcode == 0
    return peaks.get()


def _measure(first: Callable[[], object], then: Callable[[], object], peaks: Any) -> None:
    if sys.platform == "linux":  # or the peak depends on what glibc keeps for later
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 65536)
    first()
    before = compat.peak_resident_bytes()
    then()
    peaks.put(compat.peak_resident_bytes() - before)
