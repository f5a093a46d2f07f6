"""Best-fit packing: whole documents put into windows, and an index of each window's documents.

    document lengths ─► best_fit_decreasing ─► packed_L.windows, packed_L.pieces

A window of length L holds up to L + 1 tokens; `titan_loop.data.packed_index` has the format of the
two files.
"""

import hashlib
import logging
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from titan_loop.data.packed_index import PIECE, WINDOW_END
from titan_loop.data.shards import TokenShards, index_path
from titan_loop.data.source_card import PackedCard, SourceCard, SplitCard, index_paths, lock_source
from titan_loop.errors import UserError
from titan_loop.storage.json_files import write_bytes

logger = logging.getLogger(__name__)

_LARGEST_WINDOW = 1 << 24  # a larger number is surely a mistake

LongDocuments = Literal["refuse", "split"]


def pack_source(
    source: str | Path, *, seq_len: int, long_documents: LongDocuments = "refuse"
) -> dict[str, PackedCard]:
    """Pack whole documents into windows, best fit first, and store the index beside the source.

    Use it for long contexts and chats, which should not be cut. A document that is split gives
    pieces of L + 1 tokens that overlap by one, so that every token but its first is predicted once.
    Packing takes about 70 bytes of memory per document.

    Args:
        source: Folder of the source.
        seq_len: Number of predicted tokens per window, L.
        long_documents: Refuse documents of more than L + 1 tokens, or split them.
    """
    source = Path(source)
    if not 1 <= seq_len <= _LARGEST_WINDOW:
        raise UserError(f"seq_len {seq_len} must be from 1 to {_LARGEST_WINDOW}")
    SourceCard.read(source)  # before a lock file is left in a folder that is not a source
    try:
        with lock_source(source, "source"):
            return _pack(source, seq_len, long_documents)
    except OSError as error:
        raise UserError(f"source {source} cannot be written ({error.strerror})") from error


def _pack(source: Path, seq_len: int, long_documents: LongDocuments) -> dict[str, PackedCard]:
    card = SourceCard.read(source)
    splits = [name for name, split in card.splits.items() if split.tokens]
    pieces = {name: _pieces(source, name, seq_len, long_documents) for name in splits}
    if any(split.packed_for(seq_len) for split in card.splits.values()):
        # Until all files are written they belong to two packings, so the card names neither.
        card = _with_packed(card, seq_len, {})
        card.write(source)
    packed = {name: _write(source / name, seq_len, *of_split) for name, of_split in pieces.items()}
    _with_packed(card, seq_len, packed).write(source)
    return packed


def _with_packed(card: SourceCard, seq_len: int, packed: Mapping[str, PackedCard]) -> SourceCard:
    splits: dict[str, SplitCard] = {}
    for name, split in card.splits.items():
        others = [known for known in split.packed if known.seq_len != seq_len]
        new = [packed[name]] if name in packed else []
        splits[name] = replace(split, packed=(*others, *new))
    return replace(card, splits=splits)


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Assign items to bins, longest first, each to the fullest bin that has room for it.

    Equal lengths are placed in bulk: of the bins with the least sufficient room r, each takes
    r // length of them, as if they were placed singly. At most n bisections after sorting; the
    number of bins is at most 11/9 of the optimum + 4 (Johnson, 1974).

    Lengths are int64, shape (n,), each in 1..capacity. Returns each item's bin, int64, shape (n,),
    counted from 0 in the order they opened.

    Source:
        Ding et al., "Fewer Truncations Improve Language Modeling", 2024, arXiv:2404.10830.
    """
    order = np.argsort(-lengths, kind="stable")
    bin_of = np.empty(len(lengths), dtype=np.int64)
    rooms = _Rooms()
    bins = 0
    values, starts = np.unique(-lengths[order], return_index=True)
    ends = np.append(starts[1:], len(lengths))
    for value, start, end in zip((-values).tolist(), starts.tolist(), ends.tolist(), strict=True):
        while start < end:
            room = rooms.least_at_least(value)
            per_bin = (room or capacity) // value
            wanted = max(1, (end - start) // per_bin)
            if room is None:
                chosen = np.arange(bins, bins + wanted)
                bins += wanted
            else:
                chosen = rooms.take(room, wanted)
            count = min(end - start, len(chosen) * per_bin)
            bin_of[order[start : start + count]] = np.repeat(chosen, per_bin)[:count]
            placed = min(per_bin, count)
            rooms.add((room or capacity) - placed * value, chosen)
            start += count
    return bin_of


class _Rooms:
    """Bins by the room they have left; the rooms are sorted, so that bisection finds one."""

    def __init__(self) -> None:
        self._rooms: list[int] = []
        self._bins: dict[int, list[np.ndarray]] = {}

    def least_at_least(self, room: int) -> int | None:
        place = bisect_left(self._rooms, room)
        return self._rooms[place] if place < len(self._rooms) else None

    def add(self, room: int, bins: np.ndarray) -> None:
        if not room:
            return
        if room not in self._bins:
            insort(self._rooms, room)
        self._bins.setdefault(room, []).append(bins)

    def take(self, room: int, wanted: int) -> np.ndarray:
        """Remove and return up to `wanted` bins with this room, at least one."""
        chunks = self._bins[room]
        bins = chunks.pop()
        if len(bins) > wanted:
            chunks.append(bins[wanted:])
        if not chunks:
            del self._bins[room]
            del self._rooms[bisect_left(self._rooms, room)]
        return bins[:wanted]


def _pieces(
    source: Path, split: str, seq_len: int, long_documents: LongDocuments
) -> tuple[np.ndarray, int]:
    """Return the pieces to pack, in stream order, and the number of split documents."""
    shards = TokenShards(source, split)
    by_shard = [
        np.diff(np.fromfile(index_path(source / split / shard.file), "<u8"), prepend=0)
        for shard in shards.split.shards
    ]
    lengths = np.concatenate(by_shard).astype(np.int64)
    sums = [of_shard.sum() for of_shard in by_shard]
    if lengths.min() < 1 or sums != [shard.tokens for shard in shards.split.shards]:
        raise UserError(
            f"source {source}: the document ends of {split!r} do not ascend to the last "
            "token of every shard: restore the index or prepare the source again"
        )
    too_long = lengths > seq_len + 1
    split_documents = int(too_long.sum())
    if split_documents and long_documents == "refuse":
        raise UserError(
            f"source {source}: {split_documents} documents of {split!r} have more than {seq_len} + "
            f"1 tokens, the longest {int(lengths.max())}: pack longer windows, or split them with "
            "--long-documents split"
        )
    # A document of n tokens predicts n - 1; every piece but the last predicts L of them.
    counts = np.where(too_long, -(-(lengths - 1) // seq_len), 1)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    pieces = np.empty(len(number), dtype=PIECE)
    pieces["first_token"] = np.repeat(np.cumsum(lengths) - lengths, counts) + number * seq_len
    pieces["length"] = np.minimum(np.repeat(lengths, counts) - number * seq_len, seq_len + 1)
    return pieces, split_documents


def _write(folder: Path, seq_len: int, pieces: np.ndarray, split_documents: int) -> PackedCard:
    window_of = best_fit_decreasing(pieces["length"].astype(np.int64), seq_len + 1)
    ends = np.cumsum(np.bincount(window_of)).astype(WINDOW_END)
    stored = pieces[np.argsort(window_of, kind="stable")]
    contents = [ends.tobytes(), stored.tobytes()]
    for path, content in zip(index_paths(folder, seq_len), contents, strict=True):
        write_bytes(path, content)
    windows_sha256, pieces_sha256 = (hashlib.sha256(content).hexdigest() for content in contents)
    tokens = int(stored["length"].sum(dtype=np.int64))
    logger.info(
        f"{folder}: {len(stored)} pieces in {len(ends)} windows of {seq_len + 1} tokens, "
        f"{100 * tokens / (len(ends) * (seq_len + 1)):.2f} % filled"
    )
    if split_documents:
        logger.warning("%s: split %d documents longer than a window", folder, split_documents)
    return PackedCard(
        seq_len=seq_len,
        windows=len(ends),
        pieces=len(stored),
        tokens=tokens,
        split_documents=split_documents,
        windows_sha256=windows_sha256,
        pieces_sha256=pieces_sha256,
    )
