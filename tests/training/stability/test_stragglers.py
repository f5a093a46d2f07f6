"""Which rank slows down the others."""

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.stability.config import StabilityConfig
from titan_loop.training.stability.guard import Guard
from titan_loop.training.stability.stragglers import RankTimes, StepTimes, straggler

EVEN = [RankTimes(1.0, 0.001, 0.01)] * 4


def test_the_rank_whose_own_time_is_furthest_off_is_named():
    assert straggler(EVEN, 1.5) is None
    slow = [*EVEN[:2], EVEN[0]._replace(products=0.02), EVEN[0]]
    assert straggler(slow, 1.5) == (2, "computes 2.0 times as long as the others")
    assert straggler(slow, 2.5) is None
    waits = [EVEN[0], EVEN[0]._replace(data=0.5), *slow[2:]]
    assert straggler(waits, 1.5) == (1, "waits for data 25.0 times as long as the others")
    assert straggler([EVEN[0]._replace(data=0.01), *EVEN[1:]], 1.5) is None  # 1 % of a step
    assert straggler(slow[2:3], 1.5) is None  # alone


def test_one_of_two_ranks_can_be_the_slow_one():
    assert straggler([EVEN[0], EVEN[0]._replace(products=0.03)], 1.5) == (
        1,
        "computes 3.0 times as long as the others",
    )


def gather_case() -> dict:
    """The last rank waits for its data for an hour, as it says."""
    last = dist.get_rank() == dist.get_world_size() - 1
    times = StepTimes(1.5, torch.device("cpu"))
    times.begin()
    return times.gather(3600.0 if last else 0.0)


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_gets_the_times_of_all(gloo_pool, ranks):
    records = gloo_pool(ranks).run(gather_case)
    assert all(record == records[0] for record in records)
    assert records[0]["ranks/data_seconds_max"] == 3600.0
    assert f"rank {ranks - 1} on " in records[0]["straggler"]
    assert "waits for data" in records[0]["straggler"]


def warned_case() -> list[str]:
    """Every rank learns of a straggler and of a skipped step; return what this one logs."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logger = logging.getLogger("titan_loop")
    logger.addHandler(handler)
    try:
        guard = Guard(
            StabilityConfig(straggler=1.5),
            model=cast(Any, SimpleNamespace(dim=8, layers=[])),
            recurrent_steps=2,
            device=torch.device("cpu"),
            window_tokens=8,
            run=RunDirectory("nowhere"),
            writes=dist.get_rank() == 0,
            max_skipped_steps=3,
        )
        guard.begin(1, [])
        guard.rank_times([3600.0 * dist.get_rank()])
        infinite = torch.tensor(float("inf"))
        verdict = guard.agree(infinite, infinite, loss_ranks=1, stop=False)
        guard.skipped.add(verdict, step=1, windows=range(8), loss=infinite, grad_norm=infinite)
        guard.skipped.read(newest=True)
    finally:
        logger.removeHandler(handler)
    return logged


@pytest.mark.multiprocess
def test_rank_0_alone_warns_of_what_all_ranks_know(gloo_pool):
    first, *others = gloo_pool(2).run(warned_case)
    assert [line.split(" ")[0] for line in first] == ["straggler:", "step"]
    assert others == [[]]


def test_times_are_of_a_step_since_the_last_record(monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 8.0, 8.0, 8.1, 9.0, 11.0, 11.0, 11.2, 12.0])
    monkeypatch.setattr(
        "titan_loop.training.stability.stragglers.time.perf_counter", lambda: next(clock)
    )
    times = StepTimes(1.5, torch.device("cpu"))
    for _ in range(4):
        times.begin()
    record = times.gather(0.4)
    assert record["ranks/step_seconds_max"] == pytest.approx(2.0)
    assert record["ranks/data_seconds_max"] == pytest.approx(0.1)
    times.begin()
    assert times.gather(0.0)["ranks/step_seconds_median"] == pytest.approx(2.0)
    assert "straggler" not in record
