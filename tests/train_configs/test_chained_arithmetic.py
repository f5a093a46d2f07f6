"""Values and twins of expressions that are read from left to right."""

from itertools import islice

import pytest

from titan_loop.data.tasks.mano import Question
from train_configs.quickstart.chained_arithmetic import ChainedArithmetic

TASK = ChainedArithmetic(modulus=5, max_operations=4)


def test_the_answer_is_the_value_from_left_to_right():
    for question in islice(TASK.questions(0), 200):
        text, *rest = map(str, question.expression)
        for operator, operand in zip(rest[::2], rest[1::2], strict=True):
            text = f"({text} {operator} {operand})"
        assert question.answer == eval(text) % 5
        assert question.operations == len(rest) // 2


@pytest.mark.parametrize(("operator", "are_twins"), [("+", True), ("*", True), ("-", False)])
def test_the_first_operands_of_a_sum_or_product_have_no_order(operator, are_twins):
    one, other = (Question((a, operator, b, "-", 1), 2, 0) for a, b in ((2, 3), (3, 2)))
    assert (TASK.identity(one) == TASK.identity(other)) == are_twins
