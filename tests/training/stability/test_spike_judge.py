"""Judging steps: the baseline of states in float64, and where a spike began."""

import math
from typing import Any

import pytest
import torch

from titan_loop.training.stability.spike_judge import (
    Baseline,
    Evidence,
    Place,
    SpikeJudge,
    where_it_began,
)
from titan_loop.training.verdict import StepVerdict, agree_on_step

CPU = torch.device("cpu")
LAYERS, STEPS = 2, 2


def sums(scale: float = 1.0, *, at: tuple[int, int] | None = None) -> torch.Tensor:
    """Four elements a visit: states and gradients near 1, one of them scaled from a visit on."""
    found = torch.zeros(4, STEPS + 1, LAYERS)
    found[:, 1:] = 4.0
    if at is not None:
        found[0].view(-1)[at[0] * LAYERS + at[1] :] *= scale**2
        found[2] *= scale**2
    return found


def judge() -> SpikeJudge:
    return SpikeJudge(window=8, threshold=4.0, shape=(STEPS + 1, LAYERS), device=CPU)


def ask(
    of: SpikeJudge, loss: float, norm: float, these: torch.Tensor | None = None
) -> tuple[StepVerdict, Evidence]:
    values = torch.tensor(loss), torch.tensor(norm)
    evidence = of.look(*values, sums() if these is None else these, share=1.0)
    verdict = agree_on_step(*values, calm=evidence.calm())
    of.take(evidence, verdict.skip == 0)
    return verdict, evidence


def updates(*asked: Any) -> bool:
    return ask(*asked)[0].read()[0]


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
    assert verdict.skip == skipped
    assert updates(one, 2.0, 1.0)  # what was skipped has not moved the window


def test_a_planned_change_starts_the_window_anew():
    one = judge()
    one.begin([4])
    for _ in range(8):
        ask(one, 2.0, 1.0)
    one.begin([4])
    assert not updates(one, 9.0, 1.0)
    one.begin([2])
    assert updates(one, 9.0, 1.0)


def test_a_judge_that_was_saved_decides_alike():
    one, other = judge(), judge()
    one.begin([4, "x"])
    for step in range(11):
        ask(one, 2.0 + 0.1 * (step % 4), 1.0)
    other.load_state_dict(one.state_dict())
    for loss in (2.4, 2.9, 2.2, 3.4):
        for each in (one, other):
            each.begin([4, "x"])
        asked = [ask(each, loss, 1.0) for each in (one, other)]
        assert asked[0][0].read() == asked[1][0].read()
        assert torch.equal(asked[0][1].bounds, asked[1][1].bounds)


def test_a_spike_names_the_first_visit_that_stands_out():
    one = judge()
    for _ in range(8):
        ask(one, 2.0, 1.0)
    _, evidence = ask(one, 9.0, 9.0, sums(40.0, at=(2, 0)))
    place = where_it_began(evidence.places, range(LAYERS))
    assert place == Place("state", 2, 0, pytest.approx(40.0))
    assert str(place) == "state after layer 0 in recurrent step 2, 40 times the usual"
    gradient = sums()
    gradient[2] *= 100.0
    _, evidence = ask(one, 9.0, 9.0, gradient)
    place = where_it_began(evidence.places, range(LAYERS))
    assert place == Place("gradient", 2, 1, pytest.approx(10.0))
    broken = sums()
    broken[0, 1, 1:] = math.nan
    _, evidence = ask(one, math.nan, math.nan, broken)
    assert where_it_began(evidence.places, range(LAYERS))[:3] == ("state", 1, 1)
    assert where_it_began(ask(one, 9.0, 9.0)[1].places, range(LAYERS)) is None


def test_the_baseline_equals_its_definition_in_float64():
    torch.manual_seed(0)
    baseline = Baseline((1, 1), CPU)
    mean = distance = seen = 0.0
    for step in range(40):
        norms = torch.rand(2, 1, 1) + 0.5
        accept = step % 5 != 4
        if step >= 6:
            score = baseline.compare(norms, torch.ones(2, 1, 1, dtype=torch.bool))[0, 0, 0, 0]
            x = math.log(norms[0].double().item())
            assert score.item() == pytest.approx((x - mean) / max(distance, 0.02), rel=1e-3)
        baseline.take(norms, torch.tensor(accept))
        if accept:
            seen += 1
            x, rate = math.log(norms[0].double().item()), max(1 / seen, 1 / 16)
            if seen > 1:
                distance += rate * (abs(x - mean) - distance)
            mean += rate * (x - mean)
