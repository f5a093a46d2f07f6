"""The index of a packed split: the documents of every window.

`packed_L.windows` (uint64) says where each window's pieces end in `packed_L.pieces`, whose entries
are a piece's first token in the split's stream (uint64) and its length (uint32). A piece is a whole
document, EOS included, unless the document is longer than a window. `prepare/packing.py` writes
both files beside the shards.
"""

import numpy as np

from titan_loop.data.shards import TokenShards
from titan_loop.data.source_card import index_paths
from titan_loop.errors import UserError

PIECE = np.dtype([("first_token", "<u8"), ("length", "<u4")])
WINDOW_END = np.dtype("<u8")


class PackedIndex:
    """The packed windows of L + 1 tokens of one split; its files are opened when first used."""

    def __init__(self, shards: TokenShards, seq_len: int) -> None:
        packed = shards.split.packed_for(seq_len)
        if packed is None:
            known = sorted(known.seq_len for known in shards.split.packed)
            raise UserError(
                f"source {shards.folder} is not packed for windows of {seq_len} in "
                f"{shards.name!r} (packed for: {known or 'none'}): run titan-loop data pack "
                f"{shards.folder} --seq-len {seq_len}"
            )
        self.card = packed
        self._shards = shards
        self._fix = (
            f"pack the source again with titan-loop data pack {shards.folder} --seq-len {seq_len}"
        )
        if packed.split_documents:
            self._fix += " --long-documents split"
        paths = index_paths(shards.folder / shards.name, seq_len)
        sizes = packed.windows * WINDOW_END.itemsize, packed.pieces * PIECE.itemsize
        for path, expected in zip(paths, sizes, strict=True):
            found = path.stat().st_size if path.is_file() else "no"
            if found != expected:
                raise UserError(
                    f"packed index {path} has {found} bytes, its card says {expected}: {self._fix}"
                )
        self._windows_path, self._pieces_path = map(str, paths)

    @property
    def fill(self) -> float:
        """Share of the windows' tokens that is text, in (0, 1]."""
        return self.card.tokens / (self.card.windows * (self.card.seq_len + 1))

    def documents(self, window: int) -> list[tuple[int, int]]:
        """Return (first token in the split's stream, length) of each piece in window `window`."""
        if not 0 <= window < self.card.windows:
            raise IndexError(window)
        files, size = self._shards.files, self.card.seq_len + 1
        before = min(window, 1)
        ends = files.read(self._windows_path, WINDOW_END, window - before, 1 + before)
        first, last = (0, *ends.tolist())[-2:]
        if not 0 <= first < last <= min(self.card.pieces, first + size):
            raise self._damaged(window)
        pieces = files.read(self._pieces_path, PIECE, first, last - first)
        lengths = pieces["length"].astype(np.int64)
        starts = pieces["first_token"].astype(np.int64)
        inside = starts.min() >= 0 and (starts + lengths).max() <= self._shards.tokens
        if not inside or lengths.min() < 1 or lengths.sum() > size:
            raise self._damaged(window)
        return list(zip(starts.tolist(), lengths.tolist(), strict=True))

    def _damaged(self, window: int) -> UserError:
        return UserError(
            f"packed index {self._pieces_path}: window {window} is damaged; {self._fix}"
        )
