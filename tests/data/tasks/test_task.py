"""What every task gets from the base class, on the toy task, whose examples can be enumerated."""

import itertools
from dataclasses import dataclass
from itertools import islice

import pytest

from tests.data.tasks.toy_task import Backwards
from titan_loop.data.tasks.recorded_task import find_task, recorded_task
from titan_loop.data.tasks.task import Example
from titan_loop.errors import UserError
from titan_loop.plugins import Plugin, register

TASK = Backwards()
WORDS = [
    word for length in (1, 2, 3) for word in itertools.product(range(TASK.letters), repeat=length)
]


def test_every_example_is_trained_on_or_in_the_exam_and_none_in_both():
    """All 84 words; 4,000 draws miss one of the at most 64 in a stratum once in 10^8 tests."""
    trained = set(islice(TASK.questions(key=1, level=2), 4000))
    asked = {q for stratum in (1, 2, 3) for q in TASK.held_out_questions(1000, stratum)}
    assert trained & asked == set()
    assert trained | asked == set(WORDS)
    assert asked == {word for word in WORDS if TASK.is_held_out(word)}


def test_an_exam_is_drawn_by_stratum():
    exam = TASK.exam(5)
    assert list(exam) == ["1_letters", "2_letters", "3_letters"]
    assert [len(examples) for examples in exam.values()] == [
        min(5, sum(TASK.is_held_out(word) for word in WORDS if len(word) == letters))
        for letters in (1, 2, 3)
    ]
    assert list(TASK.exam(5, strata=["2_letters"])) == ["2_letters"]

    def tokens(exam: dict[str, list[Example]]) -> list[list[int]]:
        return [example.tokens.tolist() for example in exam["3_letters"]]

    assert tokens(TASK.exam(5)) == tokens(exam)


def test_a_checkpoint_names_its_task_and_parameters():
    state = {"data": {"task": "backwards", "letters": 7, "seed": 3, "seq_len": 9}}
    assert recorded_task(state) == Backwards(7)  # a parameter added later has its default
    assert recorded_task({"data": {"seed": 0, "sources": []}}) is None
    assert recorded_task({}) is None  # an imported model
    with pytest.raises(UserError, match="the task 'chess', which this version does not know"):
        recorded_task({"data": {"task": "chess"}})

    @dataclass(frozen=True)
    class Other(Backwards):
        pass

    with pytest.raises(AssertionError, match="two of tasks are called backwards"):
        register(Plugin(tasks={"backwards": Other}))
    assert find_task("backwards") is Backwards


def test_a_task_that_holds_everything_out_ends_in_one_line(monkeypatch):
    monkeypatch.setattr(Backwards, "held_out_one_in", 1)
    with pytest.raises(UserError, match=r"of 1 is left to train on; enlarge Backwards\(letters"):
        next(TASK.questions(key=0, level=0))
