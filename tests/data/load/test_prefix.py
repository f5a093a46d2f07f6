"""The prefix column: every document's tokens before its first answer, and sources without it."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.load.splits import load as load_mixture
from tests.data.load.test_packed_windows import EOS, add_masks
from titan_loop.data.labels import IGNORED
from titan_loop.data.prepare.packing import pack_source
from titan_loop.errors import UserError
from titan_loop.models.context import PREFIX

L = 16
load = partial(load_mixture, local_batch=4, seq_len=L)


def slow_prefix(positions: list[int], labels: list[int]) -> list[bool]:
    """Return one window's column, a token at a time."""
    column, answered = [], False
    for position, label in zip(positions, labels, strict=True):
        answered = answered and position > 0
        column.append(not answered)
        answered = answered or label != IGNORED
    return column


@pytest.fixture
def source(write_source, documents) -> Path:
    """Return a source with random masks."""
    source = write_source("chat", [documents(3, 60, L - 1)], held_out=[documents(4, 9, L)])
    add_masks(source)
    return source


def test_prefixes_end_before_the_first_label_of_each_document(source):
    pack_source(source, seq_len=L)
    loader, plain = load([f"{source}=1:packed"], prefix=True), load([f"{source}=1:packed"])
    lengths = []
    for (inputs, labels), (others, _) in zip(
        loader.read_step(24), plain.read_step(24), strict=True
    ):
        assert inputs[PREFIX].dtype == torch.bool
        assert torch.equal(inputs["input"], others["input"])
        assert PREFIX not in others
        for row in range(len(labels)):
            positions = inputs["positions"][row].tolist()
            found = inputs[PREFIX][row].tolist()
            assert found == slow_prefix(positions, labels[row].tolist())
            lengths += [
                sum(part) for part in np.split(found, np.flatnonzero(np.equal(positions, 0)))
            ]
    assert max(lengths) > 3
    assert loader.data_hash != plain.data_hash


def test_windows_that_cut_prompts_are_refused(source, write_source, documents):
    with pytest.raises(UserError, match=r"prefix=True: windows would cut prompts of .*chat; write"):
        load([f"{source}=1"], prefix=True)
    longer = write_source(
        "longer", [documents(3, 20, L), [[*range(1, 3 * L), EOS]]], held_out=[documents(4, 9, L)]
    )
    add_masks(longer)
    pack_source(longer, seq_len=L, long_documents="split")
    load([f"{longer}=1:packed"])
    with pytest.raises(UserError, match=rf"prefix=True: 1 documents of .*longer.*seq_len={L}; "):
        load([f"{longer}=1:packed"], prefix=True)
