"""Depo: which node comes k steps after another on a cycle whose shuffled edges are in the prompt.

    3 8  1 3  8 5  5 1  <k2> 3 5  <k1> 8 5         cycle 3 → 8 → 5 → 1, two questions

Nothing can be precomputed before the question, so a model must follow k edges after it: depth helps
by doubling or by repetition, memory does not. Training examples ask several questions about one
cycle, with 1 … `hops` steps each; an exam's example asks one.

Source: Allen-Zhu 2025, "Physics of Language Models, part 4.1" (task Depo), as a depth task beside
Ouro's Mano. Deviation: nodes are single tokens, and the exam's questions are held out by hash.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from titan_loop.data.tasks.task import Example, Task, require_sizes
from titan_loop.errors import UserError


class Cycle(NamedTuple):
    """Nodes in the order of the cycle, edges in the order of the prompt, and the questions.

    Attributes:
        order: Order in which edges are shown: index of the node that an edge leaves.
        questions: (steps, index of the first node) of each question.
    """

    nodes: tuple[int, ...]
    order: tuple[int, ...]
    questions: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Depo(Task):
    """The task with cycles of `nodes` nodes out of `names` names.

    Token ids: names, then <k1> … <k_hops>.

    Raises:
        UserError: There are fewer names than nodes, or nothing to ask.
    """

    name: ClassVar[str] = "depo"

    names: int = 64
    """Names of nodes."""

    nodes: int = 16
    """Nodes of a cycle."""

    hops: int = 8
    """Largest number of steps; below the number of nodes."""

    queries: int = 8
    """Questions about a cycle in training."""

    def __post_init__(self) -> None:
        if not 3 <= self.nodes <= self.names:
            raise UserError(
                f"Depo nodes {self.nodes} must be at least 3 and at most its {self.names} names"
            )
        if not 1 <= self.hops < self.nodes:
            raise UserError(
                f"Depo hops {self.hops} must be at least 1 and below its {self.nodes} nodes"
            )
        require_sizes(self, queries=1)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.names + self.hops

    @property
    def longest_example(self) -> int:
        """Tokens of a cycle with all its questions."""
        return 2 * self.nodes + 3 * self.queries

    @property
    def strata(self) -> Mapping[str, tuple[int, int]]:
        """Steps of the one question, from 1 to `hops`."""
        return {f"{hops}_hops": (hops, 1) for hops in range(1, self.hops + 1)}

    def choose(self, generator: random.Random, level: int) -> tuple[int, int]:
        """Choose 0 steps, which stands for any, and all questions."""
        return 0, self.queries

    def draw(self, generator: random.Random, stratum: tuple[int, int]) -> Cycle:
        """Draw names, an order of edges and questions, all uniform."""
        hops, queries = stratum

        def shuffled(count: int, kept: int) -> tuple[int, ...]:
            left = list(range(count))
            return tuple(left.pop(int(generator.random() * len(left))) for _ in range(kept))

        def steps() -> int:
            return hops or 1 + int(generator.random() * self.hops)

        return Cycle(
            shuffled(self.names, self.nodes),
            shuffled(self.nodes, self.nodes),
            tuple((steps(), int(generator.random() * self.nodes)) for _ in range(queries)),
        )

    def identity(self, question: Cycle) -> tuple[object, ...]:
        """Return the cycle from its smallest name on: the same in every order of edges."""
        first = question.nodes.index(min(question.nodes))
        return (*question.nodes[first:], *question.nodes[:first])

    def encode(self, question: Cycle) -> Example:
        """Return edges, then questions with their answers; only the answers are graded."""
        nodes, tokens = question.nodes, []
        for start in question.order:
            tokens += [nodes[start], nodes[(start + 1) % self.nodes]]
        answers = []
        for steps, start in question.questions:
            tokens += [self.names + steps - 1, nodes[start]]
            answers.append(len(tokens) - 1)
            tokens.append(nodes[(start + steps) % self.nodes])
        return Example.of_tokens(tokens, answers)
