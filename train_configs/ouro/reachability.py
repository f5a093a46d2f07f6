"""Reachability: does a path lead from s to t, over edges in the prompt and edges that are learned?

    3 7  7 1  <query> 3 5  yes        edges 3 → 7 and 7 → 1 are shown; 1 → 5 is known by heart

The hidden edges are the same in all examples and never shown: answers teach them. Shown edges are
others, drawn for every example. A distance counts hidden and shown edges alike. Half of the
questions of training have the answer no, the others distances from 1 to `distance` equally often;
the exam counts every distance on its own, and the pairs without a path.

With every loop, a one-layer transformer can double the distance up to which it knows paths,
so ⌈log₂ d⌉ + 1 loops answer a question of distance d: `depth`.
tests/families/ouro/test_reachability.py has the weights.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §6.3, Appendix B.5, Definition 2 and Theorem 2.
Deviations: the shown graph is a list of edges, as in the work that the definition comes from, not a
matrix; a question without a path counts as the deepest that is asked.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

from titan_loop.data.keyed import keyed_integer
from titan_loop.data.tasks.task import Example, Task, require_sizes
from titan_loop.errors import UserError

Edge = tuple[int, int]

_MOST_GRAPHS = 2_000
"""Graphs drawn for a question before a distance counts as impossible."""


class Query(NamedTuple):
    """Shown edges in the order of the prompt, source, target, and their distance; 0: no path."""

    shown: tuple[Edge, ...]
    source: int
    target: int
    distance: int


@dataclass(frozen=True)
class Reachability(Task):
    """The task with `nodes` nodes; token ids: nodes, then <query>, no and yes.

    Raises:
        UserError: A number is out of range, or a distance does not occur.
    """

    name: ClassVar[str] = "reachability"
    knows_depth: ClassVar[bool] = True

    nodes: int = 24
    """Nodes, n."""

    hidden_edges: int = 24
    """Edges to be learned."""

    shown_edges: int = 8
    """Edges in a prompt."""

    distance: int = 8
    """Largest distance that is asked, D."""

    world_seed: int = 0
    """Seed of the hidden edges."""

    def __post_init__(self) -> None:
        require_sizes(self, nodes=3, hidden_edges=0, shown_edges=0)
        if not 1 <= self.distance < self.nodes:
            raise UserError(
                f"Reachability distance {self.distance} must be at least 1 and below its "
                f"{self.nodes} nodes"
            )
        pairs = self.nodes * (self.nodes - 1)
        if not 1 <= self.hidden_edges + self.shown_edges <= pairs:
            raise UserError(
                f"Reachability hidden_edges {self.hidden_edges} and shown_edges "
                f"{self.shown_edges} must have a sum from 1 to {pairs}, the pairs of its nodes"
            )
        generator = random.Random(keyed_integer("reachability check", self.world_seed))
        for stratum in self.strata.values():
            self.draw(generator, stratum)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.nodes + 3

    @property
    def longest_example(self) -> int:
        """Tokens of a question with all its edges and its answer."""
        return 2 * self.shown_edges + 4

    @property
    def strata(self) -> Mapping[str, int]:
        """Every distance, then pairs without a path as 0."""
        near = {f"distance_{distance}": distance for distance in range(1, self.distance + 1)}
        return {**near, "no_path": 0}

    @property
    def most_steps(self) -> int:
        """Loops of Theorem 2 for the largest distance."""
        return loops_for(self.distance)

    @cached_property
    def hidden(self) -> frozenset[Edge]:
        """The hidden edges."""
        generator = random.Random(keyed_integer("reachability world", self.world_seed))
        return frozenset(self._edges(generator, self.hidden_edges, frozenset()))

    def _edges(
        self, generator: random.Random, count: int, taken: frozenset[Edge]
    ) -> tuple[Edge, ...]:
        """Draw different edges that are not taken and lead from one node to another."""
        edges: dict[Edge, None] = {}
        while len(edges) < count:
            edge = (int(generator.random() * self.nodes), int(generator.random() * self.nodes))
            if edge[0] != edge[1] and edge not in taken:
                edges[edge] = None
        return tuple(edges)

    def distances(self, shown: tuple[Edge, ...], source: int) -> dict[int, int]:
        """Return the distance of every node that a path leads to from `source`, itself at 0."""
        following: dict[int, list[int]] = {}
        for start, end in sorted({*self.hidden, *shown}):
            following.setdefault(start, []).append(end)
        found, newest, steps = {source: 0}, [source], 0
        while newest:
            steps += 1
            ends = dict.fromkeys(end for node in newest for end in following.get(node, ()))
            newest = [end for end in ends if end not in found]
            found |= dict.fromkeys(newest, steps)
        return found

    def choose(self, generator: random.Random, level: int) -> int:
        """Choose no path for half of the questions, else a distance."""
        if generator.random() < 0.5:
            return 0
        return 1 + int(generator.random() * self.distance)

    def draw(self, generator: random.Random, stratum: int) -> Query:
        """Draw edges and a source until some node has the distance, then one of these nodes."""
        for _ in range(_MOST_GRAPHS):
            shown = self._edges(generator, self.shown_edges, self.hidden)
            source = int(generator.random() * self.nodes)
            found = self.distances(shown, source)
            if stratum:
                targets = [node for node, steps in found.items() if steps == stratum]
            else:
                targets = [node for node in range(self.nodes) if node not in found]
            if targets:
                target = targets[int(generator.random() * len(targets))]
                return Query(shown, source, target, stratum)
        what = f"at distance {stratum}" if stratum else "without a path"
        raise UserError(
            f"Reachability with {self.hidden_edges} hidden and {self.shown_edges} shown edges "
            f"between {self.nodes} nodes has (almost) no pair {what}; change the number of edges, "
            "or lower its distance"
        )

    def identity(self, question: Query) -> tuple[object, ...]:
        """Return the edges in any order, and both ends."""
        return (*sorted(question.shown), question.source, question.target)

    def depth(self, question: Query) -> int:
        """Return the loops of Theorem 2; for a question without a path, the most that any needs."""
        return loops_for(question.distance or self.distance)

    def encode(self, question: Query) -> Example:
        """Return the edges, `<query>` and both ends; the answer is no or yes."""
        edges = [node for edge in question.shown for node in edge]
        prompt = [*edges, self.nodes, question.source, question.target]
        example = Example.of_sequence(prompt, [self.nodes + 1 + (question.distance > 0)])
        return Example(example.tokens, example.labels, example.answer, steps=self.depth(question))


def loops_for(distance: int) -> int:
    """Return ⌈log₂ distance⌉ + 1, the loops that find a path of `distance` edges."""
    return (distance - 1).bit_length() + 1
