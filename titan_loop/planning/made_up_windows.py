"""Windows of zeros, to rehearse a stage whose data is not on this machine."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from titan_loop.data.columns import Column
from titan_loop.data.load.batches import BatchesRead, DataVocabulary, GlobalBatchLoader, Position
from titan_loop.data.load.held_out_windows import HeldOutWindows
from titan_loop.data.load.windows import Window


class MadeUpWindows(GlobalBatchLoader):
    """A loader of zeros in the shapes of another loader's batches."""

    @dataclass(kw_only=True, slots=True)
    class Config(GlobalBatchLoader.Config):
        """The other loader, and the size of the vocabulary."""

        instead_of: GlobalBatchLoader.Config
        vocab_size: int = 0
        prefetch: bool = False

        def vocabulary(self) -> DataVocabulary:
            """Return the vocabulary of `vocab_size` tokens."""
            return DataVocabulary(self.vocab_size, self.vocab_size - 1)

        def columns(self) -> tuple[Column, ...]:
            """Return the columns of the other loader."""
            return self.instead_of.columns()

        def knows_depth(self) -> bool:
            """Return whether the other loader knows the depth of its windows."""
            return self.instead_of.knows_depth()

    def __init__(self, config: Config, **split: Any) -> None:
        super().__init__(config, {}, **split)

    def fill_window(self, identity: np.ndarray, window: Window) -> None:
        """Leave the window as it is: `read` makes whole batches."""

    def deepest(self, windows: int) -> int:
        """Return 1: windows of zeros need no depth."""
        return 1

    def read(self, position: Position) -> BatchesRead:
        """Return micro-batches made anew by every call, so that under a fake mode they are fake."""
        made = made_up(self._local_batch_size, self._seq_len, self.columns)
        own = {"input": made.input, "positions": made.positions, **made.columns}
        count = position.windows // self._dp_world_size // self._local_batch_size
        batches = [({**own}, made.labels.clone()) for _ in range(count)]
        return BatchesRead(batches, position.data_hash)


def made_up(count: int, seq_len: int, columns: tuple[Column, ...] = ()) -> HeldOutWindows:
    """Return `count` windows of `seq_len` tokens of zeros."""

    def zeros(*shape: int, dtype: str = "int64") -> torch.Tensor:
        return torch.zeros(*shape, dtype=getattr(torch, dtype))

    return HeldOutWindows(
        *(zeros(count, seq_len) for _ in range(4)),
        columns={
            column.name: zeros(*column.batch_shape(count, seq_len), dtype=column.dtype)
            for column in columns
        },
        whole={column.name for column in columns if not column.per_token},
    )
