"""Resuming in changed data: refused with every difference, or accepted and recorded."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.load.splits import load
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.source_card import SourceCard
from titan_loop.errors import UserError

READ = 40


@pytest.fixture
def sources(write_source, documents) -> list[Path]:
    return [write_source(name, [documents(i, 90, 20)]) for i, name in enumerate("abc")]


@pytest.fixture
def state(sources) -> dict:
    a, b, _ = sources
    loader = load([f"{a}=0.75", f"{b}=0.25"])
    loader.read_step(READ)
    return json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize(
    ("mixture", "config", "differences"),
    [
        (("a=0.5", "b=0.5"), {}, ["a: share 0.75 → 0.5", "b: share 0.25 → 0.5"]),
        (("a=0.75", "b=0.25"), {"seed": 3}, ["dataloader.seed 0 → 3"]),
        (("a=0.75", "b=0.25"), {"seq_len": 24}, ["training.seq_len 12 → 24"]),
        (("a=0.75", "c=0.25"), {}, ["c is new (share 0.25)", "b is gone"]),
        (("b=0.25", "a=0.75"), {}, ["the sources are in another order"]),
        (("a=0.75:max_epochs=2", "b=0.25"), {}, ["max_epochs None → 2", "when_exhausted"]),
    ],
)
def test_a_change_is_refused_with_every_difference(sources, state, mixture, config, differences):
    folder = sources[0].parent
    loader = load([f"{folder}/{entry}" for entry in mixture], **config)
    start = loader.state_dict()
    with pytest.raises(UserError) as refused:
        loader.load_state_dict(state)
    message = str(refused.value)
    for difference in differences:
        assert difference in message
    assert "--dataloader.accept-change" in message
    assert "\n" not in message
    assert loader.state_dict() == start


def test_a_changed_source_and_another_tokenizer_are_named(sources, state, write_source, documents):
    a, b, _ = sources
    saved = json.loads(json.dumps(state))
    saved["data"]["tokenizer"] = "0123456789abcdef"
    with pytest.raises(UserError, match="tokenizer 0123456789abcdef → same"):
        load([f"{a}=0.75", f"{b}=0.25"]).load_state_dict(saved)
    a.rename(a.with_name("old"))
    write_source("a", [documents(7, 80, 20)])
    with pytest.raises(UserError, match=r"/a: tokens \d+ → \d+, contents \w{16} → \w{16}\."):
        load([f"{a}=0.75", f"{b}=0.25"]).load_state_dict(state)


def test_what_is_no_change(sources, state):
    a, b, _ = sources
    moved = a.rename(a.with_name("moved"))
    card = SourceCard.read(b)
    train = replace(card.splits["train"], eos_only_at_ends=False)  # as on an older card
    replace(card, splits={"train": train}).write(b)
    loader = load([f"{moved}=3", f"{b}=1"], prefetch=False)  # only shares and contents count
    loader.load_state_dict(state)
    assert loader.state_dict()["read"] == state["read"]
    assert loader.data_hash == state["data_hash"]
    assert loader.accepted == []


def test_accepted_changes_are_logged_recorded_and_resumed(sources, state, caplog):
    a, b, c = sources
    changed = [f"{b}=0.5", f"{c}=0.5"]
    loader = load(changed, accept_change=True)
    with caplog.at_level(logging.WARNING):
        loader.load_state_dict(state)
    assert f"continuing at window {READ} in other data" in caplog.text
    assert "source b continues at window 10 of epoch 0" in caplog.text
    assert "source c continues at window 0 of epoch 0" in caplog.text
    (record,) = loader.accepted
    assert record["window"] == READ
    assert record["windows"] == [10, 0]
    assert f"source {a} is gone" in record["changes"]
    assert loader.data_hash not in (state["data_hash"], load(changed).data_hash)

    longer = load([f"{a}=0.75", f"{b}=0.25"], seq_len=36, accept_change=True)
    longer.load_state_dict(state)
    assert longer.accepted[0]["windows"] == [10, 4]  # 30 and 10 windows of a third, rounded up

    loader.read_step(8)
    assert [source.windows for source in loader.progress()] == [14, 4]
    middle = json.loads(json.dumps(loader.state_dict()))
    loader.read_step(8)
    resumed = load(changed)  # accepted once: the flag is not needed again
    resumed.load_state_dict(middle)
    resumed.read_step(8)
    assert resumed.state_dict() == loader.state_dict()


def test_text_may_follow_a_task(sources):
    split = {"dp_world_size": 1, "dp_rank": 0, "local_batch_size": 1}
    task = TaskLoader.Config().build(**split, seq_len=48)
    task.read_step(3)
    loader = load([f"{sources[0]}=1"], seq_len=48, accept_change=True)
    loader.load_state_dict(json.loads(json.dumps(task.state_dict())))
    assert loader.accepted[0]["windows"] == [0]
    loader.read_step(2)
    assert [source.windows for source in loader.progress()] == [2]
