"""Which rank slows down the others."""

import pytest
import torch

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
