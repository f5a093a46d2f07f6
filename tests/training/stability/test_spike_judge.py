"""Judging steps: the rolling median against Python's statistics in float64, and its verdicts."""

import math
import random
import statistics
from typing import Any

import pytest
import torch

from titan_loop.training.stability.spike_judge import (
    FLOORS,
    MAD_TO_DEVIATION,
    Evidence,
    SpikeJudge,
)
from titan_loop.training.verdict import StepVerdict, agree_on_step

CPU = torch.device("cpu")


def judge(window: int = 8, threshold: float = 4.0) -> SpikeJudge:
    return SpikeJudge(window=window, threshold=threshold, device=CPU)


def float64(loss: float, norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(loss, dtype=torch.float64), torch.tensor(norm, dtype=torch.float64)


def ask(of: SpikeJudge, loss: float, norm: float) -> tuple[StepVerdict, Evidence]:
    values = float64(loss, norm)
    evidence = of.look(*values, share=1.0)
    verdict = agree_on_step(*values, calm=evidence.calm())
    of.take(evidence, verdict.skip == 0)
    return verdict, evidence


def updates(*asked: Any) -> bool:
    return ask(*asked)[0].read()[0]


@pytest.mark.parametrize("window", [4, 5, 16])
def test_bounds_follow_from_the_last_accepted_steps(window: int):
    def expected(values: list[float], floor: float) -> float:
        median = statistics.median(values)
        spread = statistics.median([abs(value - median) for value in values])
        return median + 3.0 * max(MAD_TO_DEVIATION * spread, floor)

    source, one = random.Random(0), judge(window, 3.0)
    accepted: list[tuple[float, float]] = []
    for step in range(60):
        loss, norm = source.gauss(2, 1), math.exp(source.gauss(-1, 3))
        evidence = one.look(*float64(loss, norm), share=1.0)
        recent = accepted[-window:]
        if len(recent) < window:
            assert evidence.bounds.tolist() == [math.inf] * 2
        else:
            for number, floor in enumerate(FLOORS):
                wanted = expected([pair[number] for pair in recent], floor)
                assert evidence.bounds[number].item() == pytest.approx(wanted, rel=1e-12)
        one.take(evidence, torch.tensor(step % 3 != 0))
        accepted += [(loss, math.log(norm))] if step % 3 else []


@pytest.mark.parametrize(
    ("loss", "norm", "skipped"),
    [
        (2.0, 1.0, False),
        (9.0, 1.0, True),
        (2.0, 90.0, True),
        (-9.0, 0.01, False),
        (math.nan, 1.0, True),
        (2.0, math.inf, True),
    ],
)
def test_a_step_far_above_the_recent_ones_is_skipped(loss: float, norm: float, skipped: bool):
    one = judge()
    for step in range(8):  # not judged: the window is not full
        assert updates(one, 2.0 + 0.05 * (step % 3), 1.0 + 0.1 * (step % 2))
    verdict, _ = ask(one, loss, norm)
    assert verdict.read() == (not skipped, False)
    assert updates(one, 2.0, 1.0)  # what was skipped has not moved the window


def test_a_planned_change_starts_the_window_anew_and_a_zero_norm_stays_out():
    one = judge()
    one.begin([4])
    for _ in range(8):
        ask(one, 2.0, 1.0)
    ask(one, 0.0, 0.0)  # a batch without labels: its norm has no logarithm
    one.begin([4])
    assert not updates(one, 9.0, 1.0)
    one.begin([2])
    assert updates(one, 9.0, 1.0)


def test_a_judge_that_was_saved_decides_alike():
    one, other, longer = judge(), judge(), judge(window=9)
    one.begin([4, "x"])
    for step in range(11):
        ask(one, 2.0 + 0.1 * (step % 4), 1.0)
    for each in (other, longer):
        each.load_state_dict(one.state_dict())
        each.begin([4, "x"])
    assert updates(longer, 9.0, 1.0)  # a window of another length starts anew
    for loss in (2.4, 2.9, 2.2, 3.4):
        asked = [ask(each, loss, 1.0) for each in (one, other)]
        assert asked[0][0].read() == asked[1][0].read()
        assert torch.equal(asked[0][1].bounds, asked[1][1].bounds)
