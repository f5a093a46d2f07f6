"""Arithmetic from left to right mod m whose intermediate results are written down.

    <bos> len_6  4 * 3 - 1 + 2 * 2 - 4 + 1  <ans> 1 1 3      mod 5, a result after every two

Each written result needs two operations on the one before it, which the model has to take inside.
An answer is right if all of its tokens are.
"""

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from titan_loop.data.tasks.mano import Question
from titan_loop.data.tasks.task import Example, require_sizes

from ..quickstart.chained_arithmetic import ChainedArithmetic, applied


@dataclass(frozen=True, slots=True)
class WrittenArithmetic(ChainedArithmetic):
    """The task; tokens and exam as `ChainedArithmetic` has them."""

    name: ClassVar[str] = "written_arithmetic"

    every: int = 2
    """Operations between two written results."""

    fewest_operations: int = 1
    """Fewest operations of a training example."""

    def __post_init__(self) -> None:
        super(WrittenArithmetic, self).__post_init__()
        require_sizes(self, every=1, fewest_operations=1, max_operations=self.fewest_operations)

    @property
    def longest_example(self) -> int:
        """Tokens of an example with `max_operations` operations, its answer included."""
        results = -(-self.max_operations // self.every)
        return super(WrittenArithmetic, self).longest_example - 1 + results

    def choose(self, generator: random.Random, level: int) -> Any:
        """Choose a number of operations, all equally often."""
        fewest = self.fewest_operations
        return fewest + int(generator.random() * (self.max_operations - fewest + 1))

    def encode(self, question: Question) -> Example:
        """Return the question, `<ans>`, the result of every `every` operations, and the last."""
        value, *rest = question.expression
        assert isinstance(value, int)
        results: list[int] = []
        for operator, operand in zip(rest[::2], rest[1::2], strict=True):
            value = applied(str(operator), value, int(operand)) % self.modulus
            results.append(value)
        whole = super(WrittenArithmetic, self).encode(question)
        zero = int(whole.tokens[-1]) - question.answer
        written = [*results[self.every - 1 : -1 : self.every], results[-1]]
        return Example.of_sequence(whole.tokens[:-1].tolist(), [zero + each for each in written])
