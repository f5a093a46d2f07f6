"""Mano whose exam has no twin in training: operands of sums and products have no order.

Deviations from `Mano`, where 632 of the 674 different expressions in an exam of 1,000 (three
operations, mod 5) have a twin in training: twins are held out together, as 1 in 32 expressions; a
quarter of these, chosen by hash, form a second exam to choose settings by. With three operations
1,000 questions are found from modulus 7 on; modulus 5 has 579.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from titan_loop.data.keyed import keyed_integer
from titan_loop.data.tasks.mano import Mano, Question
from titan_loop.errors import UserError

_TUNING_ONE_IN = 4
_MOST_DRAWS = 20  # times as many as expected


class Operations(NamedTuple):
    """A number of operations, in the exam that is reported or in the one for tuning."""

    number: int
    tuning: bool = False


@dataclass(frozen=True, slots=True)
class CommutedMano(Mano):
    """The task with twins held out together: 3 + 5 with 5 + 3, and 3 * 5 with 5 * 3."""

    name: ClassVar[str] = "commuted_mano"
    held_out_one_in: ClassVar[int] = 32

    @property
    def strata(self) -> Mapping[str, Operations]:
        """The largest number of operations, as reported and for tuning."""
        name, count = f"{self.max_operations}_operations", self.max_operations
        return {name: Operations(count), f"tuning_{name}": Operations(count, tuning=True)}

    def choose(self, generator: random.Random, level: int) -> Operations:
        """Choose a number of operations, all equally often."""
        return Operations(Mano.choose(self, generator, level))

    def draw(self, generator: random.Random, stratum: Operations) -> Question:
        """Draw an expression, uniform in operators and operands."""
        return Mano.draw(self, generator, stratum.number)

    def held_out_questions(
        self, count: int, stratum: Operations, *, seed: int = 0
    ) -> list[Question]:
        """Return `count` held-out questions of the stratum's exam, with repetitions."""
        questions: list[Question] = []
        for draw in range(_MOST_DRAWS * _TUNING_ONE_IN):
            drawn = Mano.held_out_questions(self, count, stratum, seed=seed + draw)
            questions += [q for q in drawn if self._is_for_tuning(q) == stratum.tuning]
            if len(questions) >= count:
                return questions[:count]
        raise UserError(f"{self} has too few examples of {stratum} for an exam of {count}")

    def _is_for_tuning(self, question: Question) -> bool:
        hashed = keyed_integer("commuted_mano tuning", self.identity(question))
        return hashed % _TUNING_ONE_IN == 0

    def identity(self, question: Question) -> tuple[str | int, ...]:
        """Return the expression with the operands of sums and products in one order."""
        symbols = iter(question.expression)

        def ordered() -> tuple[str | int, ...]:
            symbol = next(symbols)
            if isinstance(symbol, int):
                return (symbol,)
            operands = ordered(), ordered()
            first, second = operands if symbol == "-" else sorted(operands, key=str)
            return (symbol, *first, *second)

        return ordered()
