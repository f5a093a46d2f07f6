"""Mano: arithmetic on random prefix expressions mod m, with nothing written down.

    <bos> len_2  + * 3 5 7  <ans> 22          (3 · 5) + 7 mod 23, two operations

The answer is one token, so all intermediate results must be worked out inside the model: the task
gets harder with the number of operations, and depth, not width, helps. Examples are drawn on the
fly.

Source: Zhu et al. 2025, "Scaling Latent Reasoning via Looped Language Models", arXiv 2510.25741,
section 6.2 (the task is from Allen-Zhu's Physics of Language Models, part 4.1). The shape of an
expression is not stated there: here the left operand takes a uniform share of the remaining
operations. Deviation: 1 in 64 expressions, chosen by hash, is never trained on, so that the exam is
held out and not just drawn again.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from titan_loop.data.keyed import keyed_integer
from titan_loop.errors import UserError

NAME = "mano"
OPERATORS = ("+", "-", "*")
HELD_OUT_ONE_IN = 64
_BOS, _ANSWER = 0, 1
_FIRST_VALUE = 2 + len(OPERATORS)
_MOST_DRAWS = 20  # times as many as expected


class Question(NamedTuple):
    """A prefix expression (operators as strings, operands as integers) and its value."""

    expression: tuple[str | int, ...]
    operations: int
    answer: int


@dataclass(frozen=True, slots=True)
class Mano:
    """The task with values 0..modulus-1 and expressions of 1..max_operations operations.

    Token ids: `<bos>`, `<ans>`, the operators, the values, then len_0..len_max_operations.

    Args:
        modulus: m, at least 2.
        max_operations: Largest number of operations of an expression, at least 1.

    Raises:
        UserError: If either is too small.
    """

    modulus: int
    max_operations: int

    def __post_init__(self) -> None:
        if self.modulus < 2:
            raise UserError(f"Mano modulus {self.modulus} must be at least 2")
        if self.max_operations < 1:
            raise UserError(f"Mano max_operations {self.max_operations} must be at least 1")

    @property
    def name(self) -> str:
        """See `Task.name`."""
        return NAME

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._first_length + self.max_operations + 1

    @property
    def longest_example(self) -> int:
        """Tokens of an example with `max_operations` operations, its answer included."""
        return 2 * self.max_operations + 5

    @property
    def _first_length(self) -> int:
        return _FIRST_VALUE + self.modulus

    def value(self, number: int) -> int:
        """Return the id of the value `number`."""
        return _FIRST_VALUE + number

    def encode(self, question: Question) -> list[int]:
        """Return the ids of the question up to and including `<ans>`, without the answer."""
        body = [
            2 + OPERATORS.index(s) if isinstance(s, str) else self.value(s)
            for s in question.expression
        ]
        return [_BOS, self._first_length + question.operations, *body, _ANSWER]

    def decode(self, ids: list[int]) -> str:
        """Return readable text, tokens separated by spaces."""
        names = ["<bos>", "<ans>", *OPERATORS, *(str(value) for value in range(self.modulus))]
        names += [f"len_{length}" for length in range(self.max_operations + 1)]
        return " ".join(names[token_id] for token_id in ids)

    def exam(self, count: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return held-out questions of `max_operations` operations (see `Task.exam`).

        Raises:
            UserError: The task is so small that (almost) no expression was set aside for the exam.
        """
        questions = held_out_questions(
            count, operations=self.max_operations, modulus=self.modulus, seed=seed
        )
        prompts = np.asarray([self.encode(question) for question in questions], dtype=np.int64)
        return prompts, np.asarray([self.value(question.answer) for question in questions])


def draw_question(generator: random.Random, operations: int, modulus: int) -> Question:
    """Draw an expression of `operations` operations, uniform in operators and operands."""
    # Only random() is used: Python guarantees its sequence for a seed across versions.
    expression: list[str | int] = []

    def draw(remaining: int) -> int:
        if remaining == 0:
            operand = int(generator.random() * modulus)
            expression.append(operand)
            return operand
        operator = OPERATORS[int(generator.random() * len(OPERATORS))]
        expression.append(operator)
        in_left = int(generator.random() * remaining)
        left = draw(in_left)
        right = draw(remaining - 1 - in_left)
        if operator == "+":
            return (left + right) % modulus
        return (left - right) % modulus if operator == "-" else left * right % modulus

    answer = draw(operations)
    return Question(tuple(expression), operations, answer)


def is_held_out(question: Question) -> bool:
    """Return whether the expression belongs to the exam; a function of the expression alone."""
    return keyed_integer("mano", question.expression) % HELD_OUT_ONE_IN == 0


def training_questions(key: int, max_operations: int, modulus: int) -> Iterator[Question]:
    """Yield questions without end: 1..max_operations operations, none held out."""
    generator = random.Random(key)
    while True:
        operations = 1 + int(generator.random() * max_operations)
        question = draw_question(generator, operations, modulus)
        while is_held_out(question):
            question = draw_question(generator, operations, modulus)
        yield question


def held_out_questions(
    count: int, *, operations: int, modulus: int = 23, seed: int = 0
) -> list[Question]:
    """Return `count` questions of exactly `operations` operations, none ever trained on.

    Raises:
        UserError: The task is so small that (almost) no expression was set aside for the exam.
    """
    generator = random.Random(keyed_integer("mano exam", seed, operations, modulus))
    questions: list[Question] = []
    draws = 0
    while len(questions) < count:
        draws += 1
        if draws > _MOST_DRAWS * HELD_OUT_ONE_IN * count:
            raise UserError(
                f"modulus={modulus} with {operations} operations has too few expressions for an "
                "exam; raise either"
            )
        question = draw_question(generator, operations, modulus)
        if is_held_out(question):
            questions.append(question)
    return questions


def mano_text(key: int, questions: int, *, max_operations: int = 10, modulus: int = 23) -> str:
    """Return a document of solved questions, one a line, with "=" in place of `<ans>`."""
    drawn = training_questions(key, max_operations, modulus)
    lines = [f"Prefix expressions modulo {modulus}, with their number of operations and value."]
    for _, question in zip(range(questions), drawn, strict=False):
        body = " ".join(str(symbol) for symbol in question.expression)
        lines.append(f"len_{question.operations} {body} = {question.answer}")
    return "\n".join(lines) + "\n"
