"""Stability in one process: verdicts, counting, and the weight that must not be saved."""

import logging

import pytest
import torch
from torch import nn

from titan_loop.errors import NonFiniteError, UserError
from titan_loop.training.stability import (
    SkipCounter,
    agree_on_step,
    agree_to_stop,
    first_non_finite_parameter,
)

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("loss", [1.0, INF, NAN])
@pytest.mark.parametrize("grad_norm", [1.0, INF, NAN])
@pytest.mark.parametrize("stop", [False, True])
def test_verdict(loss: float, grad_norm: float, stop: bool):
    verdict = agree_on_step(torch.tensor([loss]), torch.tensor(grad_norm), stop=stop)
    assert verdict == (loss == 1.0 and grad_norm == 1.0, stop)
    assert agree_to_stop(stop) is stop


def test_counter_stops_after_skips_in_a_row(caplog: pytest.LogCaptureFixture):
    counter = SkipCounter(3)

    def record(step: int, finite: bool) -> bool:
        windows = range(8 * step, 8 * step + 8)
        return counter.record(finite, step=step, windows=windows, loss=NAN, grad_norm=1.0)

    with caplog.at_level(logging.WARNING):
        updates = [step for step in range(5) if record(step, finite=step == 2)]
    assert updates == [2]
    assert "step 1 (windows 8 to 15)" in caplog.text
    assert "2 of 3" in caplog.text
    assert (counter.in_a_row, counter.total) == (2, 4)
    with pytest.raises(NonFiniteError, match=r"step 5 \(windows 40 to 47\): 3 steps in a row"):
        record(5, finite=False)


def test_counter_refuses_zero():
    with pytest.raises(UserError, match="max_skipped_steps=0"):
        SkipCounter(0)


def test_first_non_finite_parameter():
    second = nn.Linear(3, 2)
    model = nn.Sequential(nn.Linear(3, 3), second)
    model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    assert first_non_finite_parameter([model]) is None
    with torch.no_grad():
        second.bias[1] = NAN
        second.weight[0, 2] = -INF
    assert first_non_finite_parameter([model]) == "1.weight"
    assert first_non_finite_parameter([nn.Identity()]) is None
    half = nn.Linear(2, 2).to(torch.bfloat16)
    half.weight.data[0, 0] = INF
    assert first_non_finite_parameter([half]) == "weight"
