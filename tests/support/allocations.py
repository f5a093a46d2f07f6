"""Bytes that tensors occupy while a piece of code runs, from torch's own allocator on the CPU."""

from types import TracebackType
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "allocation mark: "


class AllocationTrace:
    """A context that records every allocation on the CPU, exactly and without sampling.

    Unlike the resident set it excludes freed pages, caches and other processes. Bytes are relative
    to the entry: memory allocated before counts as zero, and freeing it as negative.

    Attributes:
        peak_bytes: Largest number of bytes alive at a time.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._marks: dict[str, int] = {}

    def __enter__(self) -> "AllocationTrace":
        self._profile.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._profile.__exit__(kind, error, traceback)
        if error is not None:
            return
        profiler = self._profile.profiler
        assert profiler is not None
        assert profiler.kineto_results is not None
        events: list[Any] = profiler.kineto_results.events()  # the stubs lack `nbytes`
        alive = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                alive += event.nbytes()
                self.peak_bytes = max(self.peak_bytes, alive)
            elif event.name().startswith(_MARK):
                self._marks[event.name().removeprefix(_MARK)] = alive

    def mark(self, name: str) -> None:
        """Record the bytes alive here; read them with `at` after the context."""
        with record_function(_MARK + name):
            pass

    def at(self, name: str) -> int:
        """Return the bytes alive at the mark `name`, the last one if there were several."""
        return self._marks[name]
