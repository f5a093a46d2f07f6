"""Heartbeats: which ranks are silent or behind."""

import json
from pathlib import Path

import pytest

from titan_loop.runs.heartbeats import (
    Heartbeat,
    heartbeat_file,
    read_heartbeats,
    silent_ranks,
    write_heartbeat,
)
from titan_loop.training.stability.heartbeat import Pulse


def beat(rank: int, *, step: int = 5, progress: float = 95.0, written: float = 99.0) -> Heartbeat:
    return Heartbeat(
        rank=rank, host="n1", pid=7, step=step, progress=progress, written=written, seconds=10.0
    )


def test_dead_ranks_and_those_behind_are_named(tmp_path: Path):
    for one in (beat(0), beat(1, written=58.0), beat(2, step=4, progress=40.0), beat(10)):
        write_heartbeat(tmp_path, one)
    heartbeat_file(tmp_path, 3).write_text("half of it")
    heartbeat_file(tmp_path, 4).write_text('{"rank": 4}')
    found = read_heartbeats(tmp_path)
    assert [one.rank for one in found] == [0, 1, 2, 10]
    assert silent_ranks(found, now=100.0) == [
        "rank 1 on n1 (process 7) has been silent for 42 s, in step 5",
        "rank 2 on n1 (process 7) is still in step 4 of 5, for 60 s",
    ]
    assert silent_ranks(read_heartbeats(tmp_path / "elsewhere")) == []


@pytest.mark.parametrize("damage", [{"written": "x"}, {"step": "7"}, {"rank": None}, {"more": 1}])
def test_a_heartbeat_that_cannot_be_read_is_left_out(tmp_path: Path, damage: dict):
    for rank in (0, 1):
        write_heartbeat(tmp_path, beat(rank))
    path = heartbeat_file(tmp_path, 1)
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    assert [found.rank for found in read_heartbeats(tmp_path)] == [0]


def test_a_rank_writes_while_it_hangs_and_takes_its_file_away_at_the_end(tmp_path: Path):
    pulse = Pulse(tmp_path, rank=3, seconds=0.01)
    pulse.end()  # never began
    pulse.beat(6)
    while not (found := read_heartbeats(tmp_path)):
        pass
    first = found[0]
    assert (first.rank, first.step) == (3, 6)
    while (later := read_heartbeats(tmp_path)[0]).written == first.written:
        pass
    assert later.progress == first.progress  # no step began since
    pulse.end()
    assert not read_heartbeats(tmp_path)
