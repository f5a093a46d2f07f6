"""Questions of two hops over one knowledge graph; training never composes a few of its facts.

    a r1 b            atomic fact: the edge r1 leads from entity a to b; all facts are trained
    a r1 r2 c         two hops, a → b → c

A small share of the facts is out of distribution (OOD): trained by themselves, but in no trained
question of two hops. Stratum `ood_2` asks questions over two OOD facts, `id_2` untrained questions
over two facts that are not OOD. Questions that mix both kinds are neither trained nor asked.
Results depend on φ, the number of trained two-hop questions per fact that is not OOD: report it
with every result.

Source: recurrent-depth transformers, arXiv 2604.07822, §3 and §5.1 (2,000 entities, 200 relations,
out-degree 20, 5 % OOD facts, φ = 7.2). Deviation: every entity has exactly its out-degree.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np

from titan_loop.data.keyed import KeyedPermutation, keyed_integer
from titan_loop.data.tasks.task import Example, Task
from titan_loop.errors import UserError

from ..knowledge_graph import check_graph, draw_edges

Split = Literal["atomic", "train", "id", "ood"]
Facts = tuple[int, ...]
"""A question: the numbers of one or two facts; the second starts at the entity where the first
ends."""

_MOST_TRAINED = 0.95
"""Largest trained share of the questions over two facts that are not OOD; `id_2` asks the rest."""


@dataclass(frozen=True)
class TwoHopSystematic(Task):
    """The task with `entities` · `degree` facts; fact n leaves entity n // degree.

    Token ids: entities, then relations.

    Raises:
        UserError: If relations do not fit the degree, a share is out of range or a split is empty.
    """

    name: ClassVar[str] = "two_hop_systematic"

    entities: int = 2000
    """Entities of the graph."""

    relations: int = 200
    """Relations of the graph."""

    degree: int = 20
    """Number of edges that leave every entity, each with a different relation."""

    ood_share: float = 0.05
    """Share of the facts that no trained question of two hops contains."""

    inferred_ratio: float = 7.2
    """φ, the number of trained questions of two hops per fact that is not OOD."""

    graph_seed: int = 0
    """Seed of the edges and of the splits."""

    def __post_init__(self) -> None:
        check_graph(
            "TwoHopSystematic", entities=self.entities, relations=self.relations, degree=self.degree
        )
        if not 0 < self.ood_share < 1:
            raise UserError(f"TwoHopSystematic ood_share {self.ood_share} must lie between 0 and 1")
        most = _MOST_TRAINED * self.degree * (1 - self.ood_share)
        if not 0 < self.inferred_ratio <= most:
            raise UserError(
                f"TwoHopSystematic inferred_ratio {self.inferred_ratio:g} must be above 0 and at "
                f"most {most:.3g}, or too few questions are left for the exam; raise the degree"
            )
        empty = [name for name, numbers in self._splits.items() if not len(numbers)]
        if empty:
            raise UserError(
                f"{self} has no question for {empty[0]}; raise its ood_share, entities or degree"
            )

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.entities + self.relations

    @property
    def longest_example(self) -> int:
        """Tokens of a question of two hops with its answer."""
        return 4

    @property
    def strata(self) -> Mapping[str, Split]:
        """Facts, then questions of two hops: trained, held out, and over OOD facts."""
        return {"atomic": "atomic", "train_2": "train", "id_2": "id", "ood_2": "ood"}

    @cached_property
    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Relation and tail of every fact."""
        edges = draw_edges(
            "two_hop_systematic edges",
            self.graph_seed,
            entities=self.entities,
            relations=self.relations,
            degree=self.degree,
        )
        relations, tails = np.array(edges).reshape(-1, 2).T
        return relations, tails

    @cached_property
    def _splits(self) -> dict[Split, np.ndarray]:
        """Question numbers of each split; facts f, g have the number f · degree + g % degree."""
        facts = self.entities * self.degree
        is_ood = np.zeros(facts, dtype=bool)
        is_ood[self._order("facts", facts)[: round(self.ood_share * facts)]] = True
        order = self._order("questions", facts * self.degree)
        first, second = (is_ood[part] for part in self._facts(order))
        composable = order[~first & ~second]
        trained = round(self.inferred_ratio * int((~is_ood).sum()))
        return {
            "atomic": np.arange(facts),
            "train": composable[:trained],
            "id": composable[trained:],
            "ood": order[first & second],
        }

    def _order(self, what: str, count: int) -> np.ndarray:
        key = keyed_integer(f"two_hop_systematic {what}", self.graph_seed)
        return KeyedPermutation(count, key)(np.arange(count)).astype(np.int64)

    def _facts(self, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first and second facts of two-hop questions with these numbers."""
        first, edge = np.divmod(number, self.degree)
        return first, self.edges[1][first] * self.degree + edge

    @cached_property
    def _trained(self) -> np.ndarray:
        trained = np.zeros(self.entities * self.degree**2, dtype=bool)
        trained[self._splits["train"]] = True
        return trained

    def level_examples(self, level: int) -> int:
        """Return the number of facts and trained questions."""
        return len(self._splits["atomic"]) + len(self._splits["train"])

    def choose(self, generator: random.Random, level: int) -> Split:
        """Choose facts or trained questions, in proportion to their numbers."""
        facts = len(self._splits["atomic"])
        return "atomic" if generator.random() * self.level_examples(level) < facts else "train"

    def draw(self, generator: random.Random, stratum: Split) -> Facts:
        """Draw a question of a split, uniformly."""
        numbers = self._splits[stratum]
        number = numbers[int(generator.random() * len(numbers))]
        if stratum == "atomic":
            return (int(number),)
        first, second = self._facts(number)
        return int(first), int(second)

    def identity(self, question: Facts) -> tuple[int, ...]:
        """Return the facts."""
        return question

    def is_held_out(self, question: Facts) -> bool:
        """Return whether a question is never trained on; all facts are trained."""
        if len(question) == 1:
            return False
        first, second = question
        return not self._trained[first * self.degree + second % self.degree]

    def held_out_questions(self, count: int, stratum: Split, *, seed: int = 0) -> list[Facts]:
        """Return `count` questions of a stratum; the model has trained on "atomic" and "train"."""
        generator = random.Random(self.exam_key(seed, stratum))
        return [self.draw(generator, stratum) for _ in range(count)]

    def encode(self, question: Facts) -> Example:
        """Return the first entity and the relations; the answer is the last entity."""
        relations, tails = self.edges
        asked = [self.entities + int(relations[fact]) for fact in question]
        head = question[0] // self.degree
        return Example.of_sequence([head, *asked], [int(tails[question[-1]])])

    def waypoints(self, question: Facts) -> Mapping[str, tuple[int, int]]:
        """Return the bridge at the first relation, and the target at the last."""
        target = Task.waypoints(self, question)
        if len(question) == 1:
            return target
        return {"bridge": (1, int(self.edges[1][question[0]])), **target}
