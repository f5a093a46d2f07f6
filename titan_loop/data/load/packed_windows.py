"""Windows of whole documents: what best-fit packing put together when the source was prepared.

Window j of an epoch is entry j of the packed index: its pieces one after the other, then padding.
Every epoch reads every window once, in another order; a window's contents never change.
"""

import hashlib

import numpy as np

from titan_loop.data.load.windows import SourceWindows, Window
from titan_loop.data.prepare.packing import PackedIndex
from titan_loop.data.shards import TokenShards


class PackedWindows(SourceWindows):
    """The packed windows of one source.

    Padding is EOS tokens that form a document of their own: no text attends to them, and they are
    never labels.

    Args:
        shards: The source's split.
        seq_len: L.
        key: Chooses the order.

    Raises:
        UserError: If the split was not packed for this window length.
    """

    def __init__(self, shards: TokenShards, seq_len: int, key: int) -> None:
        self._index = PackedIndex.open(shards.folder, shards.name, seq_len, files=shards.files)
        super().__init__(shards, seq_len, self._index.windows, key)
        self.fill = self._index.fill

    def contents(self) -> str:
        """Return a digest of the stream and of the index (see the base class)."""
        card = self._index.card
        parts = (super().contents(), card.windows_sha256, card.pieces_sha256)
        return hashlib.blake2b("".join(parts).encode(), digest_size=16).hexdigest()

    def read_into(self, epoch: int, number: int, window: Window) -> None:
        """Read the packed window `number` (see the base class)."""
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
        """Return the windows of an epoch and how full they are."""
        return (
            f"{self.windows_per_epoch} packed windows an epoch; {1 - self.fill:.1%} of "
            "their tokens are padding"
        )
