"""Pipelines of one's own: every token once, resumed exactly, and one line for every fault."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data import pipelines
from tests.data.load.splits import rows
from tests.data.pipelines import IDS, SEQ_LEN, TEXTS
from titan_loop.data.labels import IGNORED
from titan_loop.data.load.loader import WindowLoader
from titan_loop.data.load.pipeline_loader import pack_state, read_state
from titan_loop.errors import UserError
from titan_loop.text.tokenizer import load_tokenizer

BATCH = 8
PLACE = pipelines.__name__


def load(name: str, tokenizer: Path, *, rank: int = 0, ranks: int = 1, **changes: Any) -> Any:
    options = {"pipeline": f"{PLACE}:{name}", "tokenizer_path": str(tokenizer), **changes}
    split = {"dp_world_size": ranks, "dp_rank": rank, "local_batch_size": 2}
    return WindowLoader.Config(**options).build(**split, seq_len=SEQ_LEN)


def stored(loader: Any, folder: Path) -> dict[str, Any]:
    """Store a loader's state as a checkpoint does; return the part in the manifest."""
    for name, content in loader.rank_files().items():
        (folder / name).write_bytes(content)
    return json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize(
    ("name", "rank"), [("texts", 0), ("ids", 1), ("shuffled_batches", 1), ("drawn", 0)]
)
def test_resumed_after_every_batch_is_uninterrupted(name, rank, small_tokenizer, tmp_path):
    options = {"rank": rank, "ranks": 2}
    whole = load(name, small_tokenizer, **options)
    expected = [rows(whole.read_step(BATCH)) for _ in range(3)]
    state: dict[str, Any] = {}
    for batch in expected:
        loader = load(name, small_tokenizer, **options)
        loader.load_state_dict(state)
        loader.load_rank_files(tmp_path)
        assert rows(loader.read_step(BATCH)) == batch
        state = stored(loader, tmp_path)
        loader.read_step(BATCH)  # lost with the process
        loader.close()
    assert state["data_hash"] == whole.data_hash
    whole.close()


@pytest.mark.parametrize("name", ["texts", "ids"])
def test_every_token_is_predicted_once(name, small_tokenizer):
    tokenizer = load_tokenizer(small_tokenizer)
    eos = tokenizer.token_to_id("<|endoftext|>")
    documents = IDS if name == "ids" else [tokenizer.encode(text).ids for text in TEXTS]
    stream = [token for document in documents for token in [*document, eos]]
    starts = np.cumsum([0, *(len(document) + 1 for document in documents)])
    loader = load(name, small_tokenizer)
    for first in range(0, 40 * SEQ_LEN, 2 * SEQ_LEN):
        ((inputs, labels),) = loader.read_step(2)
        for row in range(2):
            at = np.arange(first + row * SEQ_LEN, first + (row + 1) * SEQ_LEN)
            assert inputs["input"][row].tolist() == [stream[place] for place in at]
            begins = np.maximum(starts[np.searchsorted(starts, at, "right") - 1], at[0])
            assert inputs["positions"][row].tolist() == (at - begins).tolist()
            next_ones = [stream[place + 1] for place in at]
            wanted = np.where(np.isin(at + 1, starts), IGNORED, next_ones)
            assert labels[row].tolist() == wanted.tolist()
    with pytest.raises(UserError, match=r":\w+ of rank 0, after 30\d items, ended: let it yield"):
        loader.read_step(2 * len(stream))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("not_a_pipeline", "is a list: return a node of torchdata.nodes or a StatefulDataLoader"),
        ("without_state", "cannot be resumed exactly: give Plain state_dict and load_state_dict"),
        ("not_built", r"could not be built \(no corpus here\)"),
        ("raises_in_a_worker", r"after 7 items, failed \(ValueError: document 7 is torn\)"),
        ("floats", "yields float '0.5': yield texts or rows of token ids"),
        ("nothing", "yields NoneType 'None'"),
        ("half", "yields a text that cannot be encoded"),
        ("other_fields", "yields a record with 'content', 'url': it needs 'text' or 'ids'"),
        ("wrong_id", "yields the token id 4000: the tokenizer has the ids 0 to 29"),
        ("absent", f"{PLACE} has no function 'absent'"),
    ],
)
def test_a_fault_is_one_line(name, message, small_tokenizer):
    with pytest.raises(UserError, match=message) as caught:
        load(name, small_tokenizer).read_step(2000)
    assert f"dataloader.pipeline={PLACE}:{name}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline": "no.such:texts"}, "give PACKAGE.MODULE:FUNCTION"),
        ({"tokenizer_path": ""}, "needs dataloader.tokenizer_path"),
        ({"eos_token": "<eos>"}, "dataloader.eos_token '<eos>' is not in the tokenizer"),
        ({"pipeline": ""}, "dataloader.tokenizer_path=.* has no effect without dataloader.pipe"),
    ],
)
def test_options_that_do_not_fit(changes, message, small_tokenizer):
    with pytest.raises(UserError, match=message):
        load("texts", small_tokenizer, **changes)


def test_another_pipeline_begins_at_its_beginning(small_tokenizer, tmp_path):
    loader = load("texts", small_tokenizer, ranks=2)
    loader.read_step(BATCH)
    state = stored(loader, tmp_path)
    with pytest.raises(UserError, match=r"other data: pipeline .*:texts → .*:ids"):
        load("ids", small_tokenizer, ranks=2).load_state_dict(state)
    other = load("ids", small_tokenizer, ranks=2, accept_change=True)
    other.load_state_dict(state)
    other.load_rank_files(tmp_path)
    fresh = load("ids", small_tokenizer, ranks=2)
    assert rows(other.read_step(BATCH)) == rows(fresh.read_step(BATCH))


# After a change of the batch, a jump may begin within one.
@pytest.mark.parametrize("begin", [BATCH, BATCH + BATCH // 2])
def test_windows_that_are_jumped_over_are_read_and_dropped(begin, small_tokenizer):
    whole = load("ids", small_tokenizer, ranks=2)
    every = [row for _ in range(4) for row in rows(whole.read_step(BATCH))]
    loader = load("ids", small_tokenizer, ranks=2)
    first = rows(loader.read_step(BATCH))
    loader.jump([(begin, begin + 2 * BATCH)])
    half, left = begin // 2, (begin + 2 * BATCH) // 2
    assert first + rows(loader.read_step(BATCH)) == (every[:half] + every[left:])[:BATCH]


def test_states_come_back_as_they_were(tmp_path):
    state = {
        "numbers": [None, True, 1 << 130, -0.5, float("inf"), "text"],
        "nested": ({"a": ()}, [{}], (1, (2,))),
        7: {("a", 1): b"\x00\xff"},
        "tensor": torch.arange(6).reshape(2, 3).T,
        "array": np.arange(4, dtype=np.uint32),
        "scalar": np.int64(3),
    }
    path = tmp_path / "state"
    path.write_bytes(pack_state(state))
    found = read_state(path)
    assert torch.equal(found.pop("tensor"), state.pop("tensor"))
    array, expected = found.pop("array"), state.pop("array")
    assert (array.dtype, array.tolist()) == (expected.dtype, expected.tolist())
    assert found == state
    assert type(found["nested"]) is tuple
    with pytest.raises(UserError, match="state holds a set, which"):
        pack_state({"seen": {1, 2}})
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"state is damaged .*; choose another checkpoint"):
        read_state(path)
