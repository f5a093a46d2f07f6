"""Packed and masked windows: whole documents, no label across them, none in padding or masks."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.load.splits import load
from tests.data.load.splits import read as read_window
from titan_loop.data.labels import IGNORED
from titan_loop.data.load.windows import CutWindows, PackedWindows
from titan_loop.data.prepare.packing import pack_source
from titan_loop.data.shards import TokenShards
from titan_loop.data.source_card import LOSS_SUFFIX, SourceCard
from titan_loop.errors import UserError

L = 16
EOS = 0


def add_masks(source: Path) -> np.ndarray:
    """Give every shard a random mask; return the training split's, joined."""
    card = replace(SourceCard.read(source), has_loss_mask=True)
    card.write(source)
    generator = np.random.default_rng(0)
    masks: dict[str, list[np.ndarray]] = {"train": [], "held_out": []}
    for split, written in masks.items():
        for shard in card.splits[split].shards:
            written.append(generator.integers(0, 2, shard.tokens).astype(np.uint8))
            (source / split / (shard.file + LOSS_SUFFIX)).write_bytes(written[-1].tobytes())
    return np.concatenate(masks["train"])


@pytest.fixture
def source(write_source, documents) -> Path:
    stored = documents(3, 60, L)
    return write_source("chat", [stored[:23], stored[23:]], held_out=[documents(4, 40, L)])


@pytest.mark.parametrize("masked", [False, True])
def test_packed_windows_hold_whole_documents_and_padding(source, masked):
    mask = add_masks(source) if masked else None
    pack_source(source, seq_len=L)
    shards = TokenShards(source)
    stream, ends = shards.read(0, shards.tokens)
    allowed = np.ones(shards.tokens) if mask is None else mask
    starts = [0, *ends[:-1].tolist()]
    wanted: Counter = Counter()  # (document, position, label) of every token that is learnt
    for start, end in zip(starts, ends.tolist(), strict=True):
        text = stream[start:end].tolist()
        for at in range(1, len(text)):
            if allowed[start + at]:
                wanted[tuple(text), at - 1, text[at]] += 1
    by_text = {tuple(stream[s:e].tolist()): s for s, e in zip(starts, ends.tolist(), strict=True)}

    windows = PackedWindows(shards, L, key=1)
    epochs, numbers = windows.locate(np.arange(2 * windows.windows_per_epoch))
    found: Counter = Counter()
    for epoch, number in zip(epochs.tolist(), numbers.tolist(), strict=True):
        window = read_window(windows, epoch, number)
        pieces = np.split(np.arange(L), np.flatnonzero(window.positions == 0)[1:])
        for piece in pieces:
            assert window.positions[piece].tolist() == list(range(len(piece)))
            learnt = piece[window.labels[piece] != IGNORED]
            inputs = window.input[piece].tolist()
            last = window.labels[piece[-1]]
            text = tuple(t for t in (*inputs, last) if t != IGNORED)
            matches = [t for t in by_text if t[: len(inputs)] == tuple(inputs)]
            assert matches or set(inputs) == {EOS}  # a document, or padding
            for at in learnt.tolist():
                text = next(t for t in matches if t[at - piece[0] + 1] == window.labels[at])
                found[text, at - piece[0], int(window.labels[at])] += 1
    assert found == Counter({key: 2 * count for key, count in wanted.items()})


def test_a_mask_removes_labels_from_cuts_alone(source):
    plain = CutWindows(TokenShards(source), L, key=2)
    windows = [read_window(plain, 0, number) for number in range(plain.windows_per_epoch)]
    mask = add_masks(source)
    masked = CutWindows(TokenShards(source), L, key=2)
    for number, before in enumerate(windows):
        after = read_window(masked, 0, number)
        start = masked.offset(0) + number * L + 1
        assert np.array_equal(after.input, before.input)
        assert np.array_equal(after.positions, before.positions)
        wanted = np.where(mask[start : start + L] == 0, IGNORED, before.labels)
        assert np.array_equal(after.labels, wanted)


def test_a_mixture_says_which_source_is_read_packed(source, write_source, documents):
    other = write_source("text", [documents(8, 60, 20)])
    pack_source(source, seq_len=L)

    plain, loader, resumed = (
        load([f"{source}=1{option}", f"{other}=1"], seq_len=L, local_batch=8)
        for option in ("", ":packed", ":packed")
    )
    ((inputs, labels),) = loader.read_step(8)
    assert inputs["input"].dtype == labels.dtype == torch.int64
    assert loader.data_hash != plain.data_hash
    with pytest.raises(UserError, match=r"packed None → True"):
        loader.load_state_dict(plain.state_dict())
    resumed.load_state_dict(loader.state_dict())
    assert torch.equal(resumed.read_step(8)[0][1], loader.read_step(8)[0][1])
