"""A task that lives in the tests alone: say a word of a few letters backwards.

b a c <end> c a b
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from titan_loop.data.columns import Column
from titan_loop.data.tasks.task import Example, Task
from titan_loop.errors import UserError
from titan_loop.plugins import Plugin, register


@dataclass(frozen=True, slots=True)
class Backwards(Task):
    """Words of 1..longest of `letters` letters; a level more is a letter more."""

    name: ClassVar[str] = "backwards"
    held_out_one_in: ClassVar[int] = 4
    columns: ClassVar[tuple[Column, ...]] = (Column(name="left", reader="model"),)
    """Number of positions that follow in the example."""

    letters: int = 4
    """Letters of the alphabet."""

    longest: int = 3
    """Letters of the longest words."""

    def __post_init__(self) -> None:
        if self.letters < 2:
            raise UserError(f"Backwards letters {self.letters} must be at least 2")

    @property
    def vocab_size(self) -> int:
        return self.letters + 1

    @property
    def longest_example(self) -> int:
        return 2 * self.longest + 1

    @property
    def strata(self) -> Mapping[str, int]:
        return {f"{length}_letters": length for length in range(1, self.longest + 1)}

    @property
    def levels(self) -> int:
        return self.longest

    def level_strata(self, level: int) -> Sequence[str]:
        return list(self.strata)[: level + 1]

    def choose(self, generator: random.Random, level: int) -> int:
        return 1 + int(generator.random() * (level + 1))

    def draw(self, generator: random.Random, stratum: int) -> tuple[int, ...]:
        return tuple(int(generator.random() * self.letters) for _ in range(stratum))

    def identity(self, question: tuple[int, ...]) -> tuple[int, ...]:
        return question

    def encode(self, question: tuple[int, ...]) -> Example:
        example = Example.of_sequence([*question, self.letters], question[::-1])
        left = np.arange(len(example.tokens))[::-1]
        return replace(example, columns={"left": left})


register(Plugin(tasks={"backwards": Backwards}))
