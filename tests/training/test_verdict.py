"""Stability in one process: verdicts, counting, and the weight that must not be saved."""

import logging
from collections import OrderedDict
from typing import Any, cast

import pytest
import torch
from torch import nn
from torchtitan.components.optimizer import default_adamw

from titan_loop.errors import NonFiniteError
from titan_loop.training.stability.non_finite import NonFiniteSteps
from titan_loop.training.verdict import (
    StepVerdict,
    TrainedStep,
    UnreadSteps,
    agree_on_step,
    agree_to_stop,
    update_unless_skipped,
)

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize(("loss", "grad_norm"), [(1.0, 1.0), (NAN, 1.0), (1.0, INF)])
def test_verdict(loss: float, grad_norm: float, stop: bool):
    verdict = agree_on_step(torch.tensor([loss]), torch.tensor(grad_norm), stop=stop)
    finite = loss == 1.0 and grad_norm == 1.0
    assert verdict.read() == (finite, stop)
    assert verdict.skip == (not finite)
    assert agree_to_stop(stop) is stop


def counting(counter: NonFiniteSteps, skipped: list[int]) -> UnreadSteps:
    """Return a queue whose steps are counted, and noted in `skipped`."""

    def tell(trained: TrainedStep, updated: bool) -> None:
        skipped.extend([] if updated else [trained.step])
        counter.on_verdict(cast(Any, None), trained, updated=updated)

    return UnreadSteps(tell)


def add(steps: UnreadSteps, step: int, *, finite: bool, stop: bool = False) -> None:
    flags = torch.tensor([finite, not stop], dtype=torch.int32)
    windows, loss = range(8 * step, 8 * step + 8), torch.tensor(NAN)
    steps.add(TrainedStep(step, windows, loss, {}, loss, StepVerdict(flags)))


def test_skips_in_a_row_end_the_run_one_step_later(caplog: pytest.LogCaptureFixture):
    skipped: list[int] = []
    steps = counting(counter := NonFiniteSteps(3), skipped)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            add(steps, step, finite=step == 2)
            assert not steps.read(newest=False)
    assert "step 1 (windows 8 to 15)" in caplog.text
    assert "2 of 3" in caplog.text
    assert "step 4" not in caplog.text
    assert skipped == [0, 1, 3]
    steps.read(newest=True)  # as before a save
    resumed = NonFiniteSteps(3)
    resumed.load_state_dict(counter.state_dict())
    steps = counting(resumed, skipped)
    add(steps, 5, finite=False)
    assert not steps.read(newest=False)
    with pytest.raises(NonFiniteError, match=r"step 5 \(windows 40 to 47\): 3 steps in a row"):
        steps.read(newest=True)


def test_a_stop_is_heard_one_step_later_and_leaves_nothing_unread():
    skipped: list[int] = []
    steps = counting(NonFiniteSteps(2), skipped)
    add(steps, 1, finite=True, stop=True)
    assert not steps.read(newest=False)
    add(steps, 2, finite=False)
    assert steps.read(newest=False)
    assert skipped == [2]
    add(steps, 3, finite=True, stop=True)
    assert steps.read(newest=True)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_a_skipped_update_leaves_weights_and_moments_alone(implementation: str):
    """Also the step count of the bias correction: the same end as without the skipped step."""

    def trained(finite_steps: list[bool]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(OrderedDict(norm=nn.RMSNorm(3), linear=nn.Linear(3, 2)))
        config = default_adamw()
        config.implementation = implementation
        optimizers = config.build(model_parts=[model])
        for group in optimizers.optimizers[0].param_groups:
            group["lr"] = 0.1
        for finite in finite_steps:
            model(torch.arange(3.0)).square().sum().backward()
            if not finite:
                model.linear.weight.grad[0, 0] = NAN  # pyright: ignore
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            update_unless_skipped(optimizers, agree_on_step(torch.ones(()), norm))
            optimizers.zero_grad()
        (optimizer,) = optimizers
        moments = [state["exp_avg_sq"] for state in optimizer.state.values()]
        return [*(p.detach() for p in model.parameters()), *moments]

    for got, want in zip(trained([True, False, True]), trained([True, True]), strict=True):
        assert torch.equal(got, want)


def test_weights_on_another_device_than_the_verdict_wait_for_it():
    """Offloaded to the host, a fused optimiser would read a copy that is still on its way."""

    class Fused:
        param_groups = [{"fused": True, "params": [torch.zeros(1, device="meta")]}]  # noqa: RUF012

    class Optimizers(list):
        steps = 0

        def step(self) -> None:
            self.steps += 1

    optimizers = Optimizers([Fused()])
    for finite in (False, True):
        verdict = agree_on_step(torch.tensor(1.0 if finite else NAN), torch.tensor(1.0))
        update_unless_skipped(optimizers, verdict)  # type: ignore[arg-type]
    assert optimizers.steps == 1
    assert "found_inf" not in vars(optimizers[0])
