"""Global batches of windows that are addressed by number, split over ranks and micro-batches.

A loader says which window has number k, a pure function. The *set* of windows of a global batch is
then the same for every split into ranks, local batches and accumulation steps. While a step trains,
a thread reads the next global batch; it counts as consumed only when the training loop takes it.
"""

import hashlib
import struct
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from titan_loop.data.columns import LABELLED, OWN_NAMES, Column
from titan_loop.data.labels import IGNORED
from titan_loop.data.load.batches import Batch, BatchesRead, GlobalBatchLoader, Position
from titan_loop.data.load.windows import Window

_WINDOW_ID = struct.Struct("<QQQ")


def empty_batch(
    count: int, seq_len: int, columns: Sequence[Column] = ()
) -> tuple[Batch, list[Window]]:
    """Return a batch to be filled, and its rows as windows over the same memory."""
    own = {name: torch.empty(count, seq_len, dtype=torch.int64) for name in OWN_NAMES}
    named = {
        column.name: torch.empty(
            column.batch_shape(count, seq_len), dtype=getattr(torch, column.dtype)
        )
        for column in columns
    }
    windows = [
        Window(
            **{name: values.numpy()[row] for name, values in own.items()},
            columns={name: values.numpy()[row, ...] for name, values in named.items()},
        )
        for row in range(count)
    ]
    labels = own.pop("labels")
    return (own | named, labels), windows


class GlobalWindowLoader(GlobalBatchLoader):
    """Base of loaders whose windows have numbers.

    With dp ranks and local batch b, window k of the global batch that starts at window s goes to

        micro-batch m = (k - s) // (dp b),   rank r = (k - s) % (dp b) // b,   row (k - s) % b

    `data_hash` covers the description and the ids of the windows, in order: it is equal on all
    ranks, and independent of how windows were grouped into batches.

    Args:
        config: Its `prefetch`, and what the base class reads.
        description: As in the base class.
        **split: Ranks, local batch size b and window length, as in the base class.
    """

    def __init__(
        self, config: GlobalBatchLoader.Config, description: Mapping[str, Any], **split: Any
    ) -> None:
        super().__init__(config, description, **split)
        self._prefetch = config.prefetch
        self._few_labels = config.few_labels()
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: tuple[Position, Future[BatchesRead]] | None = None

    @abstractmethod
    def locate(self, window: np.ndarray) -> np.ndarray:
        """Return the identity of each global window: uint64, shape (len(window), 3).

        Raises:
            UserError: If there are no such windows.
        """

    @abstractmethod
    def fill_window(self, identity: np.ndarray, window: Window) -> None:
        """Build the window with this identity (a row of what `locate` returns)."""

    def depth(self, identity: np.ndarray) -> int:
        """Return the recurrent steps that the window with this identity needs, where known."""
        raise NotImplementedError

    def deepest(self, windows: int) -> int:
        """Return the largest depth of the next windows (see the base class)."""
        identity = self.locate(self.next_windows(self.windows_consumed, windows))
        return max(self.depth(row) for row in identity)

    def read(self, position: Position) -> BatchesRead:
        """Take what the thread has read, or read it now; then let the thread read on."""
        ahead = self._take_ahead()
        if ahead is not None and ahead[0] == position:
            read = ahead[1].result()
        else:
            read = self._read_now(position)
        if self._prefetch:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
            after = int(self.next_windows(position.first_window, position.windows)[-1]) + 1
            following = Position(after, position.windows, read.data_hash)
            self._ahead = (following, self._thread.submit(self._read_now, following))
        return read

    def close(self) -> None:
        """End the prefetching thread; what it has read is forgotten, and was never consumed."""
        self._take_ahead()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def jump(self, windows: Iterable[tuple[int, int]]) -> None:
        """As the base class; what was read ahead is read again."""
        self._take_ahead()
        super().jump(windows)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the base class."""
        self._take_ahead()
        super().load_state_dict(state_dict)

    def _read_now(self, position: Position) -> BatchesRead:
        """Read this rank's part of a global batch; a pure function of the position."""
        first, count, data_hash = position
        identity = self.locate(self.next_windows(first, count))
        by_rank = identity.reshape(-1, self._dp_world_size, self._local_batch_size, 3)
        batches: list[Batch] = []
        for identities in by_rank[:, self._dp_rank]:
            batch, windows = empty_batch(self._local_batch_size, self._seq_len, self.columns)
            for row, window in zip(identities, windows, strict=True):
                self.fill_window(row, window)
            if self._few_labels:
                inputs, labels = batch
                inputs[LABELLED] = (labels.flatten() != IGNORED).nonzero().flatten()
            batches.append(batch)
        digest = bytes.fromhex(data_hash)
        for row in identity.tolist():
            digest = hashlib.blake2b(digest + _WINDOW_ID.pack(*row), digest_size=16).digest()
        return BatchesRead(batches, digest.hex())

    def _take_ahead(self) -> tuple[Position, "Future[BatchesRead]"] | None:
        """Return what the thread was reading, once it is done: it shares its caches with us."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead[1].exception()
        return ahead
