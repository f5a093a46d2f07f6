"""MQAR: the values of several keys, looked up among key-value pairs in the prompt.

    k4 v1  k2 v7  k9 v3   k2 v7  k4 v1             three pairs, two queries

It asks for recall, not for depth: one attention over the pairs answers it. Loops that help here
help by attention, so it is the control beside tasks that need several steps.

Source: Arora et al. 2023, "Zoology", arXiv 2312.04927, §3. Deviation: queries are uniform over the
pairs instead of a power law of their distance, and exam prompts are held out by hash.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from titan_loop.data.tasks.task import Example, Task, require_sizes
from titan_loop.errors import UserError


class Recall(NamedTuple):
    """Keys and values of the pairs, and which pairs are queried."""

    keys: tuple[int, ...]
    values: tuple[int, ...]
    queries: tuple[int, ...]


@dataclass(frozen=True)
class MQAR(Task):
    """The task with up to `pairs` pairs.

    Token ids: keys, then values.

    Raises:
        UserError: There are fewer keys than pairs, or nothing to ask.
    """

    name: ClassVar[str] = "mqar"

    keys: int = 64
    """Different keys; the keys of a prompt are distinct."""

    values: int = 64
    """Different values."""

    pairs: int = 16
    """Most pairs of a prompt; powers of 2 up to it are trained equally often."""

    queries: int = 4
    """Queries of a prompt."""

    def __post_init__(self) -> None:
        if not 2 <= self.pairs <= self.keys:
            raise UserError(
                f"MQAR pairs {self.pairs} must be at least 2 and at most its {self.keys} keys"
            )
        require_sizes(self, values=2, queries=1)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.keys + self.values

    @property
    def longest_example(self) -> int:
        """Tokens of the longest prompt with its answers."""
        return 2 * (self.pairs + self.queries)

    @property
    def strata(self) -> Mapping[str, int]:
        """Numbers of pairs."""
        counts = [2**power for power in range(1, self.pairs.bit_length())]
        return {f"{count}_pairs": count for count in counts}

    def choose(self, generator: random.Random, level: int) -> int:
        """Choose a number of pairs."""
        return 2 ** (1 + int(generator.random() * (self.pairs.bit_length() - 1)))

    def draw(self, generator: random.Random, stratum: int) -> Recall:
        """Draw distinct keys, values and queries, all uniform."""
        left = list(range(self.keys))
        return Recall(
            tuple(left.pop(int(generator.random() * len(left))) for _ in range(stratum)),
            tuple(int(generator.random() * self.values) for _ in range(stratum)),
            tuple(int(generator.random() * stratum) for _ in range(self.queries)),
        )

    def identity(self, question: Recall) -> tuple[int, ...]:
        """Return the pairs in the order of the prompt."""
        return (*question.keys, *question.values)

    def encode(self, question: Recall) -> Example:
        """Return pairs, then queries with their values; only the latter are graded."""
        values = [self.keys + value for value in question.values]
        tokens = [t for pair in zip(question.keys, values, strict=True) for t in pair]
        for index in question.queries:
            tokens += [question.keys[index], values[index]]
        return Example.of_tokens(tokens, range(2 * len(values), len(tokens), 2))
