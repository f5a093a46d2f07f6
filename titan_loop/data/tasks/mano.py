"""Mano: arithmetic on random prefix expressions mod m, with no intermediate result written down.

    <bos> len_2  + * 3 5 7  <ans> 22          (3 · 5) + 7 mod 23, two operations

The answer is one token, so the model must work out all intermediate results inside: depth, not
width, helps with more operations.

Source: Zhu et al. 2025, "Scaling Latent Reasoning via Looped Language Models", arXiv 2510.25741,
section 6.2 (the task is from Allen-Zhu's Physics of Language Models, part 4.1). The shape of an
expression is not stated there: here the left operand takes a uniform share of the remaining
operations. Deviation: 1 in 64 expressions, chosen by hash, is held out for the exam. As in the
paper, the exam is of the largest length alone. Deviation: a packed window cuts off its last
expression, which is a long one more often than a short one: in windows of 1,024 tokens 95 % of the
answers to 24 operations remain, and 99.5 % of the answers to one.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from titan_loop.data.keyed import keyed_integer
from titan_loop.data.tasks.task import Example, Task, require_sizes

OPERATORS = ("+", "-", "*")
_BOS, _ANSWER = 0, 1
_FIRST_VALUE = 2 + len(OPERATORS)


class Question(NamedTuple):
    """A prefix expression (operators as strings, operands as integers) and its value."""

    expression: tuple[str | int, ...]
    operations: int
    answer: int


@dataclass(frozen=True, slots=True)
class Mano(Task):
    """The task; token ids: `<bos>`, `<ans>`, operators, values, then len_0..len_max_operations."""

    name: ClassVar[str] = "mano"

    modulus: int = 23
    """Values are 0..modulus-1."""

    max_operations: int = 10
    """Examples have 1..max_operations operations, equally often."""

    def __post_init__(self) -> None:
        require_sizes(self, modulus=2, max_operations=1)

    @property
    def vocab_size(self) -> int:
        return self._first_length + self.max_operations + 1

    @property
    def longest_example(self) -> int:
        """Tokens of an example with `max_operations` operations, its answer included."""
        return 2 * self.max_operations + 5

    @property
    def strata(self) -> Mapping[str, Any]:
        """The largest number of operations alone."""
        return {f"{self.max_operations}_operations": self.max_operations}

    @property
    def _first_length(self) -> int:
        return _FIRST_VALUE + self.modulus

    def choose(self, generator: random.Random, level: int) -> Any:
        """Choose a number of operations, all equally often."""
        return 1 + int(generator.random() * self.max_operations)

    def draw(self, generator: random.Random, stratum: Any) -> Question:
        """Draw an expression of `stratum` operations, uniform in operators and operands."""
        expression: list[str | int] = []

        def draw(remaining: int) -> int:
            if remaining == 0:
                operand = int(generator.random() * self.modulus)
                expression.append(operand)
                return operand
            operator = OPERATORS[int(generator.random() * len(OPERATORS))]
            expression.append(operator)
            in_left = int(generator.random() * remaining)
            left = draw(in_left)
            right = draw(remaining - 1 - in_left)
            if operator == "+":
                return (left + right) % self.modulus
            return (left - right if operator == "-" else left * right) % self.modulus

        answer = draw(stratum)
        return Question(tuple(expression), stratum, answer)

    def identity(self, question: Question) -> tuple[str | int, ...]:
        """Return the expression; the same in every modulus."""
        return question.expression

    def exam_key(self, seed: int, stratum: Any) -> int:
        return keyed_integer("mano exam", seed, stratum, self.modulus)

    def encode(self, question: Question) -> Example:
        """Return the question, `<ans>` and the value."""
        body = [
            2 + OPERATORS.index(symbol) if isinstance(symbol, str) else _FIRST_VALUE + symbol
            for symbol in question.expression
        ]
        prompt = [_BOS, self._first_length + question.operations, *body, _ANSWER]
        return Example.of_sequence(prompt, [_FIRST_VALUE + question.answer])
