"""When a curriculum passes, and the settings that it refuses."""

from typing import Any

import pytest

from tests.data.tasks.toy_task import Backwards
from titan_loop.data.load.promotion import Curriculum
from titan_loop.errors import UserError


def check(*, longest: int = 3, one_example: bool = False, **values: Any) -> None:
    curriculum = Curriculum(**{"enabled": True, "interval": 1, **values})
    curriculum.check(Backwards(letters=9, longest=longest), one_example=one_example)


@pytest.mark.parametrize(
    ("accuracy", "strict", "passes"),
    [(0.94, False, False), (0.95, False, True), (0.95, True, False), (0.96, True, True)],
)
def test_a_level_passes_at_its_accuracy_or_above_it(accuracy, strict, passes):
    assert Curriculum(strict=strict).passes(accuracy) == passes


def test_bounds_are_accepted():
    check(questions=1, accuracy=0.0, recurrent_steps=0, limit_tokens=0)
    check(longest=1, enabled=False, interval=-1, accuracy=9.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"longest": 1}, "enabled: task backwards has one level: leave it out"),
        ({"interval": 0}, "interval=0: give the steps between two exams, at least 1"),
        ({"interval": -1, "one_example": True}, "interval=-1: give the steps"),
        ({"accuracy": 1.1}, "accuracy=1.1 must lie between 0 and 1"),
        ({"questions": 0}, "questions=0 must be at least 1"),
        ({"recurrent_steps": -1}, "recurrent_steps=-1 must be at least 0"),
        ({"limit_tokens": -1}, "limit_tokens=-1 must be at least 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(values, message):
    with pytest.raises(UserError, match=rf"dataloader\.curriculum\.{message}"):
        check(**values)
