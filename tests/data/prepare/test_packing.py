import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.test_inspect_source import change
from tests.support.failing_disk import largest_file
from titan_loop.data.inspect_source import verify_source
from titan_loop.data.packed_index import PackedIndex
from titan_loop.data.prepare import packing
from titan_loop.data.prepare.packing import best_fit_decreasing, pack_source
from titan_loop.data.shards import TokenShards
from titan_loop.data.source_card import SourceCard, index_paths
from titan_loop.errors import UserError


def naive_fills(lengths: list[int], capacity: int) -> list[int]:
    """Best-fit decreasing as its definition reads, quadratic; the fill of every bin, sorted."""
    fills: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [bin_ for bin_, fill in enumerate(fills) if fill + length <= capacity]
        if fitting:
            fills[max(fitting, key=lambda bin_: fills[bin_])] += length
        else:
            fills.append(length)
    return sorted(fills)


@given(
    st.integers(1, 40).flatmap(
        lambda capacity: st.tuples(
            st.just(capacity), st.lists(st.integers(1, capacity), min_size=1, max_size=60)
        )
    )
)
def test_bins_are_those_of_the_definition(case):
    capacity, lengths = case
    bin_of = best_fit_decreasing(np.asarray(lengths), capacity)
    fills = np.bincount(bin_of, weights=lengths).astype(int)
    assert sorted(fills.tolist()) == naive_fills(lengths, capacity)


def stream_of(source: Path, split: str = "train") -> np.ndarray:
    shards = TokenShards(source, split)
    return shards.read(0, shards.tokens)[0]


def open_index(source: Path, split: str, seq_len: int) -> PackedIndex:
    return PackedIndex(TokenShards(source, split), seq_len)


def test_every_document_is_in_exactly_one_window(write_source, documents):
    stored = documents(0, 300, 30)
    source = write_source("s", [stored[:100], stored[100:101], stored[101:]], held_out=[stored[:3]])
    packed = pack_source(source, seq_len=32)
    index = open_index(source, "train", 32)
    assert SourceCard.read(source).splits["train"].packed == (packed["train"],) == (index.card,)
    stream = stream_of(source)
    found = []
    for window in range(index.card.windows):
        pieces = index.documents(window)
        assert sum(length for _, length in pieces) <= 33
        found += [tuple(stream[first : first + length]) for first, length in pieces]
    assert sorted(found) == sorted(map(tuple, stored))
    tokens = sum(map(len, stored))
    assert index.card.tokens == tokens
    assert index.fill == tokens / (33 * index.card.windows)
    assert index.card.windows <= 11 / 9 * np.ceil(tokens / 33) + 4  # the method's own bound
    held_out = open_index(source, "held_out", 32)
    assert sum(len(held_out.documents(window)) for window in range(held_out.card.windows)) == 3


def test_long_documents_are_refused_or_split(write_source):
    stored = [[5, 6, 0], [*list(range(1, 24)), 0], [*range(1, 17), 0], [9, 0]]
    source = write_source("s", [stored])
    with pytest.raises(UserError, match=r"2 documents .* more than 8 \+ 1 tokens, the longest 24"):
        pack_source(source, seq_len=8)
    assert SourceCard.read(source).splits["train"].packed == ()
    card = pack_source(source, seq_len=8, long_documents="split")["train"]
    assert card.split_documents == 2
    index = open_index(source, "train", 8)
    stream = stream_of(source)
    labels = []  # the position of every predicted token
    for window in range(index.card.windows):
        for first, length in index.documents(window):
            assert 2 <= length <= 9
            assert (stream[first : first + length - 1] != 0).all()  # no piece spans documents
            labels += range(first + 1, first + length)
    starts = {0, 3, 27, 44}
    assert sorted(labels) == [token for token in range(len(stream)) if token not in starts]


def test_packing_again_may_be_interrupted_anywhere(write_source, documents, monkeypatch):
    """Stopped at any rename, the card names a whole index, or none that is half replaced."""
    source = write_source("s", [documents(1, 50, 20)], [documents(2, 20, 20)])
    with monkeypatch.context() as other:  # an earlier index of another version: a window a document
        other.setattr(packing, "best_fit_decreasing", lambda lengths, _: np.arange(len(lengths)))
        first = pack_source(source, seq_len=32)
    rename, wanted = os.replace, first
    for renames in range(7):  # the card, four files and the card
        left = renames

        def rename_or_stop(old: str | Path, new: str | Path) -> None:
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1
            rename(old, new)

        with monkeypatch.context() as stop, suppress(KeyboardInterrupt):
            stop.setattr(os, "replace", rename_or_stop)
            wanted = pack_source(source, seq_len=32)
        assert [fault for fault in verify_source(source) if "packed_32" in fault] == []
        assert not list(source.glob("**/.*"))
    assert wanted["train"].windows < first["train"].windows
    pack_source(source, seq_len=64)  # beside the other
    packed = SourceCard.read(source).splits["train"].packed
    assert packed[0] == wanted["train"]
    assert [card.seq_len for card in packed] == [32, 64]


@pytest.mark.parametrize(
    ("file", "at", "value"),  # beyond the pieces; more tokens than a window has; beyond the stream
    [("windows", 0, 4), ("pieces", 8, 8), ("pieces", 0, 200)],
)
def test_a_damaged_window_is_named(write_source, file, at, value):
    source = write_source("s", [[[0], [5, 0], [5, 6, 7, 0]]])  # a document of one token, too
    pack_source(source, seq_len=8)
    change(source / "train" / f"packed_8.{file}", at, value)
    with pytest.raises(UserError, match="window 0 is damaged; pack the source again"):
        open_index(source, "train", 8).documents(0)


def test_damage_and_mistakes(write_source):
    source = write_source("s", [[[5, 0], [6, 7, 0]]])

    def refused(message: str, seq_len: int = 8, split: str = "train") -> None:
        with pytest.raises(UserError, match=message):
            open_index(source, split, seq_len)

    refused(r"not packed for windows of 8 .* none.* --seq-len 8")
    pack_source(source, seq_len=8)
    refused(r"not packed for windows of 9 in 'train' .*\[8\]", 9)
    refused("no tokens in its split 'held_out'", split="held_out")
    windows, pieces = index_paths(source / "train", 8)
    pieces.write_bytes(pieces.read_bytes()[:-1])
    refused("has 23 bytes, its card says 24")
    windows.unlink()
    refused("has no bytes, its card says 8")
    for seq_len in (0, 2**24 + 1):
        with pytest.raises(UserError, match=f"seq_len {seq_len} must be from 1 to 16777216"):
            pack_source(source, seq_len=seq_len)
    with largest_file(4), pytest.raises(UserError, match=r"source .* cannot be written \(File too"):
        pack_source(source, seq_len=16)
    index = next((source / "train").glob("*.index"))
    index.write_bytes(index.read_bytes()[::-1])
    with pytest.raises(UserError, match="document ends of 'train' do not ascend"):
        pack_source(source, seq_len=8, long_documents="split")
    assert [card.seq_len for card in SourceCard.read(source).splits["train"].packed] == [8]
