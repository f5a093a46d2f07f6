"""The plan of a step: R of its micro-batches, its cost, and its record."""

from dataclasses import replace

import pytest

from titan_loop.errors import UserError
from titan_loop.training.step_plan import StepPlan

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
