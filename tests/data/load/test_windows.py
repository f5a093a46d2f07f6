import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.load.splits import empty_window
from tests.data.load.splits import read as read_window
from titan_loop.data.labels import IGNORED
from titan_loop.data.load.windows import CutWindows
from titan_loop.data.shards import TokenShards
from titan_loop.errors import UserError


def open_cuts(folder: Path, seq_len: int, key: int) -> CutWindows:
    return CutWindows(TokenShards(folder), seq_len, key)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(0, 5))
def test_cut_window_equals_a_token_by_token_reference(lengths, skip):
    document_of = [n for n, length in enumerate(lengths) for _ in range(length)][skip:]
    if len(document_of) < 2:
        return
    ids = np.arange(100, 100 + len(document_of))
    ends = np.asarray([e - skip for e in np.cumsum(lengths) if e > skip])
    window = empty_window(len(ids) - 1)
    window.fill(ids, ends)
    positions, position = [], 0
    for i in range(len(document_of) - 1):
        position = 0 if i == 0 or document_of[i] != document_of[i - 1] else position + 1
        positions.append(position)
    assert window.input.tolist() == ids[:-1].tolist()
    assert window.positions.tolist() == positions
    same = [a == b for a, b in itertools.pairwise(document_of)]
    wanted = [label if kept else IGNORED for label, kept in zip(ids[1:], same, strict=True)]
    assert window.labels.tolist() == wanted


@pytest.mark.parametrize("seq_len", [4, 7, 16, 49])
def test_an_epoch_predicts_every_token_between_the_cuts_once(write_source, documents, seq_len):
    stored = documents(0, 30, 9)
    folder = write_source("source", [stored[:11], stored[11:]])
    stream = [token for document in stored for token in document]
    windows = open_cuts(folder, seq_len, key=5)
    per_epoch = windows.windows_per_epoch
    for epoch in range(4):
        counters = np.arange(epoch * per_epoch, (epoch + 1) * per_epoch)
        epochs, cuts = windows.locate(counters)
        assert epochs.tolist() == [epoch] * per_epoch
        assert sorted(cuts.tolist()) == list(range(per_epoch))
        read = [read_window(windows, epoch, int(cut)) for cut in cuts]
        first = windows.offset(epoch)
        assert Counter(t for window in read for t in window.input.tolist()) == Counter(
            stream[first : first + per_epoch * seq_len]
        )
        # The label of an EOS is another document's first token.
        inside = itertools.pairwise(stream[first : first + per_epoch * seq_len + 1])
        labels = Counter(t for window in read for t in window.labels.tolist() if t != IGNORED)
        assert labels == Counter(label for token, label in inside if token != 0)
    assert windows.unread_tokens_per_epoch == len(stream) - 1 - per_epoch * seq_len
    assert windows.unread_tokens_per_epoch < 2 * seq_len


def test_a_source_shorter_than_a_window(write_source):
    with pytest.raises(UserError, match=r"has 5 tokens in 'train', .* training.seq_len \+ 1 = 6"):
        open_cuts(write_source("s", [[[1, 2, 3, 4, 0]]]), 5, key=0)
