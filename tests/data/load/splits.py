"""A small job, its splits over ranks and micro-batches, and the windows a rank reads."""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from titan_loop.data.load.loader import WindowLoader
from titan_loop.data.load.windows import Batch, SourceWindows, Window, empty_batch

L = 12
GLOBAL_BATCH = 24
STEPS = 6


def load(
    mixture: Sequence[str],
    ranks: int = 1,
    rank: int = 0,
    local_batch: int = 1,
    seq_len: int = L,
    **config: Any,
) -> WindowLoader:
    """Return a loader over sources."""
    return WindowLoader.Config(mixture=[*mixture], **config).build(  # type: ignore[return-value]
        dp_world_size=ranks, dp_rank=rank, seq_len=seq_len, local_batch_size=local_batch
    )


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
