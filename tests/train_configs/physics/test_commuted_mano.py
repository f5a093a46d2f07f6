"""Expressions that differ by the order of a sum's or product's operands are held out together."""

from itertools import islice

import pytest

from titan_loop.data.tasks.mano import Mano, Question
from titan_loop.errors import UserError
from train_configs.physics.commuted_mano import CommutedMano, Operations


def twins(expression: tuple[str | int, ...]) -> set[tuple[str | int, ...]]:
    """Return the expressions that differ by the order of a sum's or product's operands."""

    def read(at: int) -> tuple[list[tuple[str | int, ...]], int]:
        symbol = expression[at]
        if isinstance(symbol, int):
            return [(symbol,)], at + 1
        left, middle = read(at + 1)
        right, end = read(middle)
        both = [(symbol, *a, *b) for a in left for b in right]
        if symbol != "-":
            both += [(symbol, *b, *a) for a in left for b in right]
        return both, end

    return {*read(0)[0]}


def test_an_expression_is_held_out_with_its_twins() -> None:
    task = CommutedMano(5, 3)
    exam = {question.expression for question in task.held_out_questions(200, Operations(3))}
    several = 0
    for question in islice(task.questions(0), 2000):
        assert exam.isdisjoint(twins(question.expression))
    for expression in exam:
        own = twins(expression)
        several += len(own) > 1
        assert all(task.is_held_out(Question(twin, 3, 0)) for twin in own)
    assert several > 50
    minus = Question(("-", 1, 2), 1, 4), Question(("-", 2, 1), 1, 1)
    assert len({task.identity(question) for question in minus}) == 2
    sums = Question(("+", 1, 2), 1, 3), Question(("+", 2, 1), 1, 3)
    assert len({task.identity(question) for question in sums}) == 1
    assert len({Mano(5, 3).identity(question) for question in sums}) == 2


def test_settings_are_chosen_on_other_questions_than_are_reported() -> None:
    task = CommutedMano(7, 2)
    assert list(task.strata) == ["2_operations", "tuning_2_operations"]
    reported, tuning = (
        {task.identity(question) for question in task.held_out_questions(400, stratum)}
        for stratum in task.strata.values()
    )
    assert reported.isdisjoint(tuning)
    assert len(tuning) > 10
    assert len(reported) > 1.5 * len(tuning)  # most questions that are held out are reported
    for question in task.held_out_questions(50, Operations(2, tuning=True)):
        assert task.is_held_out(question)
        assert question.operations == 2


def test_a_task_that_holds_out_too_few_is_refused() -> None:
    with pytest.raises(UserError, match="too few examples of"):
        CommutedMano(2, 1).exam(100)
