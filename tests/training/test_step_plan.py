"""The plan of a step: R of its micro-batches, its cost, and its record."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from titan_loop.errors import UserError
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.step_plan import StepPlan, regime, step_flops, trained_recurrence

PLAN = StepPlan(
    step=3, tokens=600, windows=8, recurrent_steps=4, backward_steps=2, learning_rate=1e-3,
    schedules={"z": 0.0123, "entropy_weight": 0.05},
)  # fmt: skip
DRAWN = replace(PLAN, depths=(2, 6))


def test_parts_of_a_batch_have_their_depths_in_order():
    assert [PLAN.recurrent_steps_of(number, 3) for number in range(3)] == [4, 4, 4]
    assert [DRAWN.recurrent_steps_of(number, 4) for number in range(4)] == [2, 2, 6, 6]
    assert [DRAWN.recurrent_steps_of(number, 2) for number in range(2)] == [2, 6]
    with pytest.raises(UserError, match="a step of 3 micro-batches cannot have 2 depths"):
        DRAWN.recurrent_steps_of(0, 3)


def test_the_cost_is_the_mean_over_depths_times_tokens():
    asked: list[tuple[Any, ...]] = []

    def flops(*given: Any) -> Any:
        asked.append(given)
        return SimpleNamespace(total=10 * given[1])

    model: Any = SimpleNamespace(training_flops=flops)
    assert step_flops(model, PLAN, seq_len=16, trainable="all") == 10 * 4 * 8 * 16
    assert step_flops(model, DRAWN, seq_len=16, trainable="gate") == 10 * (2 + 6) / 2 * 8 * 16
    assert asked == [(16, 4, "all", 2), (16, 2, "gate", 2), (16, 6, "gate", 2)]


RECURRENCE = RecurrenceConfig(steps=Schedule.constant(4))


def test_a_regime_compares_settings_to_a_digit():
    assert regime(RECURRENCE, PLAN, level=1) == [4, 2, 1, "entropy_weight 0.05", "z 0.01"]


def test_a_checkpoint_records_the_typical_and_the_last_depth():
    plan = replace(PLAN, recurrent_steps=7)
    assert trained_recurrence(RECURRENCE, plan) == {
        "recurrent_steps": 4,
        "recurrence": {
            "last_steps": 7,
            "mean_steps": 4,
            "min_steps": RECURRENCE.min_steps,
            "max_steps": RECURRENCE.max_steps,
        },
    }
