"""When a curriculum passes, and the settings that it refuses."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from titan_loop.data.load.promotion import Curriculum
from titan_loop.errors import UserError


@dataclass
class Levels:
    """A task of which nothing but the levels matters."""

    levels: int = 3
    examples: int = 100
    name: str = "levels"
    asked: list[Any] = field(default_factory=list)

    def level_examples(self, level: int) -> int:
        return self.examples if level == 0 else 0

    def level_strata(self, level: int) -> list[str]:
        return [f"up to {level}"]

    def check_exam(self, questions: int, *, strata: list[str]) -> None:
        self.asked.append((questions, strata))


def check(task: Levels, *, one_example: bool = False, **values: Any) -> None:
    curriculum = Curriculum(**{"enabled": True, "interval": 1, **values})
    curriculum.check(task, one_example=one_example)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("accuracy", "strict", "passes"),
    [(0.94, False, False), (0.95, False, True), (0.95, True, False), (0.96, True, True)],
)
def test_a_level_passes_at_its_accuracy_or_above_it(accuracy, strict, passes):
    assert Curriculum(strict=strict).passes(accuracy) == passes


def test_the_exam_of_every_level_but_the_last_is_looked_at():
    task = Levels()
    check(task, questions=7)
    assert task.asked == [(7, ["up to 0"]), (7, ["up to 1"])]


@pytest.mark.parametrize(
    "values",
    [
        {"interval": 0, "one_example": True},
        {"accuracy": 0.0},
        {"accuracy": 1.0},
        {"questions": 1},
        {"recurrent_steps": 0, "limit_tokens": 0},
        {"enabled": False, "interval": -1, "accuracy": 9.0},
    ],
)
def test_bounds_are_accepted(values):
    check(Levels(levels=2), **values)


@pytest.mark.parametrize(
    ("task", "values", "message"),
    [
        (Levels(levels=1), {}, "enabled: task levels has one level: leave it out"),
        (Levels(), {"interval": 0}, "interval=0: give the steps between two exams, at least 1"),
        (Levels(), {"interval": -1, "one_example": True}, "interval=-1: give the steps"),
        (Levels(examples=0), {"interval": 0, "one_example": True}, "interval=0: give the steps"),
        (Levels(), {"accuracy": -0.1}, "accuracy=-0.1 must lie between 0 and 1"),
        (Levels(), {"accuracy": 1.1}, "accuracy=1.1 must lie between 0 and 1"),
        (Levels(), {"questions": 0}, "questions=0 must be at least 1"),
        (Levels(), {"recurrent_steps": -1}, "recurrent_steps=-1 must be at least 0"),
        (Levels(), {"limit_tokens": -1}, "limit_tokens=-1 must be at least 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(task, values, message):
    with pytest.raises(UserError, match=rf"dataloader\.curriculum\.{message}"):
        check(task, **values)
    assert not task.asked
