"""The index of a packed split: the documents of every window.

`packed_L.windows` (uint64) says where each window's pieces end in `packed_L.pieces`, whose entries
are a piece's first token in the split's stream (uint64) and its length (uint32). A piece is a whole
document, EOS included, unless the document is longer than a window. Both files lie beside the
shards; their checksums are in `source.json`. `titan_loop.data.prepare.packing` writes them.
"""

from pathlib import Path

import numpy as np

from titan_loop.data.open_files import OpenFiles
from titan_loop.data.source_card import PackedCard, SourceCard, packed_names
from titan_loop.errors import UserError

PIECE = np.dtype([("first_token", "<u8"), ("length", "<u4")])
WINDOW_END = np.dtype("<u8")


class PackedIndex:
    """The packed windows of one split; its files are opened when first used.

    Attributes:
        seq_len: L; a window's pieces sum to at most L + 1 tokens.
    """

    @classmethod
    def open(
        cls, source: str | Path, split: str, seq_len: int, *, files: OpenFiles | None = None
    ) -> "PackedIndex":
        """Open the index of a prepared source; reads `source.json` and two file sizes.

        Raises:
            UserError: If the source is unusable, was not packed for this window length, or a file
                of the index is missing or has another size than the card says.
        """
        source = Path(source)
        card = SourceCard.read(source)
        if split not in card.splits:
            raise UserError(f"source {source} has no split {split!r}: add documents to it")
        packed = card.splits[split].packed_for(seq_len)
        if packed is None:
            known = sorted(known.seq_len for known in card.splits[split].packed)
            raise UserError(
                f"source {source} is not packed for windows of {seq_len} in {split!r} (packed for: "
                f"{known or 'none'}): run titan-loop data pack {source} --seq-len {seq_len}"
            )
        files = OpenFiles() if files is None else files
        return cls(source / split, packed, card.splits[split].tokens, files)

    def __init__(
        self, folder: Path, card: PackedCard, stream_tokens: int, files: OpenFiles
    ) -> None:
        self.card = card
        self.windows = card.windows
        self.seq_len = card.seq_len
        self._stream_tokens = stream_tokens
        self._files = files
        windows_path, pieces_path = index_paths(folder, card.seq_len)
        _require_size(windows_path, card.windows * WINDOW_END.itemsize)
        _require_size(pieces_path, card.pieces * PIECE.itemsize)
        self._windows_path, self._pieces_path = str(windows_path), str(pieces_path)

    @property
    def fill(self) -> float:
        """Share of the windows' L + 1 tokens each that hold text, in (0, 1]."""
        return self.card.tokens / (self.windows * (self.seq_len + 1))

    def documents(self, window: int) -> list[tuple[int, int]]:
        """Return (first token in the split's stream, length) of each piece in window `window`."""
        if not 0 <= window < self.windows:
            raise IndexError(window)
        before = min(window, 1)
        ends = self._files.read(self._windows_path, WINDOW_END, window - before, 1 + before)
        first, last = (0, *ends.tolist())[-2:]
        if not 0 <= first < last <= min(self.card.pieces, first + self.seq_len + 1):
            raise self._damaged(window)
        pieces = self._files.read(self._pieces_path, PIECE, first, last - first)
        lengths = pieces["length"].astype(np.int64)
        starts = pieces["first_token"].astype(np.int64)
        if (
            int(lengths.min()) < 1
            or int(lengths.sum()) > self.seq_len + 1
            or int(starts.min()) < 0
            or int((starts + lengths).max()) > self._stream_tokens
        ):
            raise self._damaged(window)
        return list(zip(starts.tolist(), lengths.tolist(), strict=True))

    def _damaged(self, window: int) -> UserError:
        return UserError(
            f"packed index {self._pieces_path}: window {window} is damaged; pack the source again "
            "with titan-loop data pack"
        )


def index_paths(folder: Path, seq_len: int) -> tuple[Path, Path]:
    """Return the paths of a split's window ends and pieces."""
    windows, pieces = packed_names(seq_len)
    return folder / windows, folder / pieces


def _require_size(path: Path, expected_bytes: int) -> None:
    found_bytes = path.stat().st_size if path.is_file() else None
    if found_bytes != expected_bytes:
        raise UserError(
            f"packed index {path} has {found_bytes or 'no'} bytes, its card says {expected_bytes}: "
            "pack the source again with titan-loop data pack"
        )
