"""Which rank slows down the others."""

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from titan_loop.training.stability.stragglers import RankTimes, Stragglers, straggler

EVEN = [RankTimes(1.0, 0.001, 0.01)] * 4


def test_the_rank_whose_own_time_is_furthest_off_is_named():
    assert straggler(EVEN, 1.5) is None
    slow = [*EVEN[:2], EVEN[0]._replace(products=0.02), EVEN[0]]
    assert straggler(slow, 1.5) == (2, "computes 2.0 times as long as the others")
    assert straggler(slow, 2.0) is not None
    assert straggler(slow, 2.5) is None
    waits = [EVEN[0], EVEN[0]._replace(data=0.5), *slow[2:]]
    assert straggler(waits, 1.5) == (1, "waits for data 25.0 times as long as the others")
    assert straggler([EVEN[0]._replace(data=0.01), *EVEN[1:]], 1.5) is None  # 1 % of a step
    assert straggler(slow[2:3], 1.5) is None  # alone


def gather_case() -> dict:
    """The last rank waits for its data for an hour, as it says."""
    last = dist.get_rank() == dist.get_world_size() - 1
    times = Stragglers(1.5, torch.device("cpu"))
    return times.gather(3600.0 if last else 0.0)


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_gets_the_times_of_all(gloo_pool, ranks):
    records = gloo_pool(ranks).run(gather_case)
    assert all(record == records[0] for record in records)
    assert records[0]["ranks/data_seconds_max"] == 3600.0
    assert f"rank {ranks - 1} on " in records[0]["straggler"]
    assert "waits for data" in records[0]["straggler"]


def test_times_are_of_a_step_since_the_last_record(monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 8.0, 8.0, 8.1, 9.0, 11.0, 11.0, 11.2, 12.0])
    monkeypatch.setattr(
        "titan_loop.training.stability.stragglers.time.perf_counter", lambda: next(clock)
    )
    times, trainer = Stragglers(1.5, torch.device("cpu")), cast(Any, None)
    for _ in range(4):
        for phase in ("reading data", "reading data", "update"):  # as a pipeline's data is read
            times.on_phase(trainer, phase)
    record = times.gather(0.4)
    assert record["ranks/step_seconds_max"] == pytest.approx(2.0)
    assert record["ranks/data_seconds_max"] == pytest.approx(0.1)
    times.on_phase(trainer, "update")
    assert times.gather(0.0)["ranks/step_seconds_median"] == pytest.approx(2.0)
    assert "straggler" not in record


def test_a_straggler_is_warned_of_when_it_becomes_one(monkeypatch, caplog):
    found = iter(["", "rank 1 waits 2.0 times", "rank 1 waits 3.0 times", "", "rank 1 waits", ""])
    monkeypatch.setattr(Stragglers, "gather", lambda self, seconds: {"straggler": next(found)})
    waits = SimpleNamespace(data_loading_times=[1.0, 2.0])
    trainer: Any = SimpleNamespace(metrics_processor=waits)
    times = Stragglers(1.5, torch.device("cpu"))
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            times.record(trainer)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["straggler: rank 1 waits 2.0 times", "straggler: rank 1 waits"]
