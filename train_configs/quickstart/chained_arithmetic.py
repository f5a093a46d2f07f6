"""Arithmetic from left to right mod m, with no intermediate result written down.

    <bos> len_3  4 * 3 - 1 + 2  <ans> 3          ((4 · 3) − 1) + 2 mod 5, three operations

Each operation needs the result of the one before, and the answer is one token: the model has to
take the steps inside. This is Mano in the order in which people write and without nested operands,
so a small layer learns it in a minute.
"""

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from titan_loop.data.keyed import keyed_integer
from titan_loop.data.tasks.mano import OPERATORS, Mano, Question


def applied(operator: str, value: int, operand: int) -> int:
    """Return one operation's result, not yet reduced."""
    if operator == "*":
        return value * operand
    return value + operand if operator == "+" else value - operand


@dataclass(frozen=True, slots=True)
class ChainedArithmetic(Mano):
    """The task; tokens, parameters and exam as Mano has them."""

    name: ClassVar[str] = "chained_arithmetic"

    def draw(self, generator: random.Random, stratum: Any) -> Question:
        """Draw `stratum` operations, uniform in operators and operands."""
        value = int(generator.random() * self.modulus)
        expression: list[str | int] = [value]
        for _ in range(stratum):
            operator = OPERATORS[int(generator.random() * len(OPERATORS))]
            operand = int(generator.random() * self.modulus)
            expression += [operator, operand]
            value = applied(operator, value, operand)
        return Question(tuple(expression), stratum, value % self.modulus)

    def identity(self, question: Question) -> tuple[str | int, ...]:
        """Return the expression; 3 + 4 … is held out with 4 + 3 …, and 3 * 4 … with 4 * 3 …."""
        first, operator, second, *rest = question.expression
        if operator != "-":
            first, second = sorted((first, second), key=int)
        return (first, operator, second, *rest)

    def exam_key(self, seed: int, stratum: Any) -> int:
        """See the base class."""
        return keyed_integer("chained_arithmetic exam", seed, stratum, self.modulus)
