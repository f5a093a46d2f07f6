"""A small job, its splits over ranks and micro-batches, and the windows a rank reads."""

import torch
from hypothesis import strategies as st

from titan_loop.data.load.windows import Batch, SourceWindows, Window, empty_batch

L = 12
GLOBAL_BATCH = 24
STEPS = 6


def rows(batches: list[Batch]) -> list[tuple[int, ...]]:
    """Return every window of a rank's micro-batches as one tuple of all its numbers."""
    return [
        tuple(torch.cat([inputs["input"][i], inputs["positions"][i], labels[i]]).tolist())
        for inputs, labels in batches
        for i in range(len(labels))
    ]


def empty_window(seq_len: int) -> Window:
    """Return a window to be filled."""
    _, (window,) = empty_batch(1, seq_len)
    return window


def read(windows: SourceWindows, epoch: int, number: int) -> Window:
    """Return the window `number` of `epoch`."""
    window = empty_window(windows.seq_len)
    windows.read_into(epoch, number, window)
    return window


splits = st.sampled_from([(r, b) for r in (1, 2, 3, 4, 6) for b in (1, 2, 3, 4, 6)]).filter(
    lambda split: GLOBAL_BATCH % (split[0] * split[1]) == 0
)
