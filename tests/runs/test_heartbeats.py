"""Heartbeats: which ranks are silent or behind."""

from pathlib import Path

from titan_loop.runs.heartbeats import (
    Heartbeat,
    heartbeat_file,
    read_heartbeats,
    silent_ranks,
    write_heartbeat,
)
from titan_loop.training.stability.heartbeat import Pulse


def beat(
    rank: int,
    *,
    step: int = 5,
    phase: str = "update",
    progress: float = 95.0,
    collective: str = "",
    written: float = 99.0,
) -> Heartbeat:
    return Heartbeat(
        rank=rank,
        host="n1",
        pid=7,
        step=step,
        phase=phase,
        progress=progress,
        collective=collective,
        written=written,
        seconds=10.0,
    )


GATHER = "nccl:all_gather 812 of fsdp (started)"


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


def test_the_rank_outside_of_the_collective_that_the_others_wait_in_is_named():
    """Rank 2 hangs in another part of the same step."""
    beats = [beat(rank, progress=40.0, collective=GATHER) for rank in range(4)]
    beats[2] = beat(2, phase="reading data", progress=30.0)
    line = (
        "rank 2 on n1 (process 7) is in no collective, in reading data of step 5, for 70 s; "
        f"3 other ranks wait in {GATHER}"
    )
    assert silent_ranks(beats, now=100.0) == [line]
    assert silent_ranks(beats, now=69.0) == []  # not yet: a step may take so long
    assert len(silent_ranks(beats, now=69.0, hung=True)) == 1


def test_the_rank_in_another_collective_than_most_is_named():
    beats = [beat(rank, progress=40.0, collective=GATHER) for rank in range(4)]
    beats[1] = beat(1, progress=40.0, collective="nccl:all_reduce 3 of tp (scheduled)")
    (line,) = silent_ranks(beats, now=100.0)
    assert line.startswith("rank 1 on n1 (process 7) is in nccl:all_reduce 3 of tp (scheduled),")
    assert line.endswith(f"3 other ranks wait in {GATHER}")
    beats[1] = beats[0]
    assert silent_ranks(beats, now=100.0) == [
        f"all 4 ranks are in {GATHER}, in update of step 5, for 60 s"
    ]


def test_a_rank_writes_while_it_hangs_and_takes_its_file_away_at_the_end(tmp_path: Path):
    pulse = Pulse(tmp_path, rank=3, seconds=0.01)
    pulse.close()  # never began
    pulse.enter(6, "reading data")
    while not (found := read_heartbeats(tmp_path)):
        pass
    first = found[0]
    assert (first.rank, first.step) == (3, 6)
    while (later := read_heartbeats(tmp_path)[0]).written == first.written:
        pass
    assert later.progress == first.progress  # no step began since
    pulse.close()
    assert not read_heartbeats(tmp_path)
