"""Windows of one source, read in a keyed order, epoch after epoch.

    fixed cuts   window j is the L + 1 tokens from `offset + j L` of the stored stream
    packed       window j is entry j of the packed index: whole documents, then padding

Neighbouring cuts share one token, so every token between the first and the last cut is predicted
exactly once an epoch. The offset changes with the epoch, so that a repeated document is cut
elsewhere. A packed window's contents never change.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from titan_loop.data.columns import OWN_NAMES, Column
from titan_loop.data.keyed import KeyedPermutation, keyed_integer
from titan_loop.data.labels import IGNORED
from titan_loop.data.packed_index import PackedIndex
from titan_loop.data.shards import TokenShards
from titan_loop.errors import UserError

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""({"input", "positions", declared columns …}, labels): int64 tensors (b, L)."""


class Window(NamedTuple):
    """One training sequence: arrays of shape (L,) and dtype int64, filled in place.

    `positions` restart at 0 with every document. `labels` are IGNORED where input and label belong
    to different documents, where a loss mask forbids it, and in padding. `columns` holds declared
    columns by name, without the axis of the batch.
    """

    input: np.ndarray
    positions: np.ndarray
    labels: np.ndarray
    columns: Mapping[str, np.ndarray] = {}

    def fill(self, ids: np.ndarray, ends: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Overwrite this window with L + 1 tokens.

        Args:
            ids: Token ids, any integer type, shape (L + 1,).
            ends: Ascending document ends in 1..L + 1 (int64): token e - 1 is its document's last.
            mask: 0 where a token may not be a label, shape (L + 1,); None allows all.
        """
        length = len(self.input)
        self.input[:] = ids[:-1]
        self.labels[:] = ids[1:]
        if len(ends) and ends[-1] > length:
            ends = ends[:-1]
        bounds = np.zeros(len(ends) + 2, dtype=np.int64)
        bounds[1:-1], bounds[-1] = ends, length
        document_start = bounds[:-1].repeat(bounds[1:] - bounds[:-1])
        np.subtract(np.arange(length), document_start, out=self.positions)
        self.labels[ends - 1] = IGNORED
        if mask is not None:
            self.labels[mask[1:] == 0] = IGNORED


def empty_batch(
    count: int, seq_len: int, columns: Sequence[Column] = ()
) -> tuple[Batch, list[Window]]:
    """Return a batch to be filled, and its rows as windows over the same memory."""
    own = {name: torch.empty(count, seq_len, dtype=torch.int64) for name in OWN_NAMES}
    named: dict[str, torch.Tensor] = {}
    for column in columns:
        dtype = getattr(torch, column.dtype)
        named[column.name] = torch.empty(column.batch_shape(count, seq_len), dtype=dtype)
    windows = [
        Window(
            **{name: values.numpy()[row] for name, values in own.items()},
            columns={name: values.numpy()[row, ...] for name, values in named.items()},
        )
        for row in range(count)
    ]
    labels = own.pop("labels")
    return (own | named, labels), windows


class SourceWindows(ABC):
    """The endless sequence of windows of one source, addressed by the source's own counter.

    Every epoch has the same number of windows n, so that a division of the counter gives epoch and
    number; within an epoch the order is a permutation of 0..n-1, which `key` chooses.
    """

    fill = 1.0
    """Share of an epoch's tokens that are text, not padding, in (0, 1]."""

    def __init__(self, shards: TokenShards, seq_len: int, windows_per_epoch: int, key: int) -> None:
        self.shards = shards
        self.seq_len = seq_len
        self.windows_per_epoch = windows_per_epoch
        self._key = key

    @abstractmethod
    def read_into(self, epoch: int, number: int, window: Window) -> None:
        """Fill `window` with the window `number` of `epoch`."""

    @abstractmethod
    def describe_epoch(self) -> str:
        """Describe the windows of an epoch, and the tokens left out, for the log."""

    def contents(self) -> str:
        """Return a digest of everything the windows are made of: 32 hexadecimal digits."""
        return self.shards.contents()

    def locate(self, counter: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return epoch (int64) and number (uint64) of the windows at `counter` (any shape)."""
        epoch, ordinal = np.divmod(np.asarray(counter, dtype=np.int64), self.windows_per_epoch)
        number = np.empty(ordinal.shape, dtype=np.uint64)
        for value in np.unique(epoch).tolist():
            chosen = epoch == value
            key = keyed_integer("order", self._key, value)
            number[chosen] = KeyedPermutation(self.windows_per_epoch, key)(ordinal[chosen])
        return epoch, number


class CutWindows(SourceWindows):
    """Fixed cuts of a source's stream: n = max(1, floor((T - L) / L)) windows of its T tokens.

    Attributes:
        unread_tokens_per_epoch: Tokens before the offset and after the last cut, fewer than 2 L,
            which no window of an epoch predicts.
    """

    def __init__(self, shards: TokenShards, seq_len: int, key: int) -> None:
        tokens = shards.tokens
        if tokens < seq_len + 1:
            raise UserError(
                f"source {shards.folder} has {tokens} tokens in {shards.name!r}, less than one "
                f"window of training.seq_len + 1 = {seq_len + 1}: lower it or add documents"
            )
        super().__init__(shards, seq_len, max(1, (tokens - seq_len) // seq_len), key)
        self.unread_tokens_per_epoch = tokens - 1 - self.windows_per_epoch * seq_len

    def offset(self, epoch: int) -> int:
        """Return the first token of the cuts of `epoch`: below L, and so early that all fit."""
        choices = min(self.seq_len, self.unread_tokens_per_epoch + 1)
        return keyed_integer("offset", self._key, epoch) % choices

    def start(self, epoch: int, number: int) -> int:
        """Return the first token of the cut `number` of `epoch`."""
        return self.offset(epoch) + number * self.seq_len

    def read_into(self, epoch: int, number: int, window: Window) -> None:
        start = self.start(epoch, number)
        ids, ends = self.shards.read(start, self.seq_len + 1)
        window.fill(ids, ends, self.shards.read_mask(start, self.seq_len + 1))

    def describe_epoch(self) -> str:
        return (
            f"{self.windows_per_epoch} windows an epoch; the {self.unread_tokens_per_epoch} tokens "
            "before the first and behind the last are left out of it"
        )


class PackedWindows(SourceWindows):
    """The packed windows of one source.

    Padding is EOS tokens that form a document of their own: no text attends to them, and they are
    never labels.
    """

    def __init__(self, shards: TokenShards, seq_len: int, key: int) -> None:
        self._index = PackedIndex(shards, seq_len)
        super().__init__(shards, seq_len, self._index.card.windows, key)
        self.fill = self._index.fill

    def contents(self) -> str:
        """Return a digest of the stream and of the index (see the base class)."""
        card = self._index.card
        parts = f"{super().contents()}{card.windows_sha256}{card.pieces_sha256}"
        return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()

    def read_into(self, epoch: int, number: int, window: Window) -> None:
        size = self.seq_len + 1
        ids = np.full(size, self.shards.card.eos_id, dtype=np.int64)
        mask = np.zeros(size, dtype=np.uint8)
        ends: list[int] = []
        stop = 0
        for first_token, length in self._index.documents(number):
            here = slice(stop, stop + length)
            ids[here] = self.shards.read_ids(first_token, length)
            learnt = self.shards.read_mask(first_token, length)
            mask[here] = 1 if learnt is None else learnt
            stop += length
            ends.append(stop)
        window.fill(ids, np.asarray(ends, dtype=np.int64), mask)

    def describe_epoch(self) -> str:
        padding = f"{1 - self.fill:.1%} of their tokens are padding"
        return f"{self.windows_per_epoch} packed windows an epoch; {padding}"
