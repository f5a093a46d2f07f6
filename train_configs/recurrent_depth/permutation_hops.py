"""Questions of many hops over a graph whose relations are permutations of the entities.

    a r1 b                  atomic fact: relation r1 leads from entity a to b; all are trained
    a r1 r2 … rk c          k hops; one in `held_out_one_in` is asked in exams and never trained

Since every relation is a bijection, no suffix of the relations tells where the path ends: all hops
must be followed. A curriculum's first level has facts and questions of two hops; each later level
adds one hop. A level's exam asks questions with its largest number of hops. The exam of a trained
model may also ask more hops than were trained (`asked_hops`).

Source: recurrent-depth transformers, arXiv 2604.07822, §6.1 and Appendix B (200 entities, 10
relations, 15,000 questions of each number of hops up to 40). Deviations: questions are held out by
hash, and the trained ones are drawn independently from the rest, so that questions of few hops can
repeat; the paper's are distinct. An epoch draws its examples with replacement: it has as many as
there are trained questions and facts, but need not contain all of them.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np

from titan_loop.data.keyed import keyed_integer
from titan_loop.data.tasks.task import Example, Task, require_sizes
from titan_loop.errors import UserError

_FEWEST_ASKED = 8
"""Smallest expected number of held-out questions of two hops."""


class Hops(NamedTuple):
    """A stratum: its questions' number of hops, and whether they are trained ones."""

    hops: int
    trained: bool


class Path(NamedTuple):
    """A question: the entity it starts from and its relations."""

    entity: int
    relations: tuple[int, ...]


@dataclass(frozen=True)
class PermutationHops(Task):
    """The task with `entities` · `relations` facts; token ids: entities, then relations.

    Raises:
        UserError: A size is too small, `hops` is above `asked_hops`, or too few questions of two
            hops would be held out.
    """

    name: ClassVar[str] = "permutation_hops"
    held_out_one_in: ClassVar[int] = 16

    entities: int = 200
    """Entities of the graph."""

    relations: int = 10
    """Relations, each a random permutation of the entities."""

    hops: int = 40
    """Largest number of trained hops; a curriculum reaches it at its last level."""

    asked_hops: int = 40
    """Largest number of hops in the exam."""

    trained_questions: int = 15_000
    """Number of trained questions for each number of hops from 2 on."""

    fact_weight: int = 1
    """Frequency of a fact in training, relative to one question of several hops."""

    graph_seed: int = 0
    """Seed of the permutations and of the choice of trained questions."""

    def __post_init__(self) -> None:
        require_sizes(self, entities=2, relations=1, trained_questions=1, fact_weight=1)
        if not 2 <= self.hops <= self.asked_hops:
            raise UserError(
                f"PermutationHops hops {self.hops} must be at least 2 and at most its asked_hops "
                f"{self.asked_hops}"
            )
        held_out = self.entities * self.relations**2 / self.held_out_one_in
        if held_out < _FEWEST_ASKED:
            raise UserError(
                f"PermutationHops with {self.entities} entities and {self.relations} relations "
                f"holds out {held_out:.3g} questions of two hops, fewer than {_FEWEST_ASKED}; "
                "enlarge it"
            )

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.entities + self.relations

    @property
    def longest_example(self) -> int:
        """Tokens of a question of `asked_hops` hops with its answer."""
        return self.asked_hops + 2

    @property
    def strata(self) -> Mapping[str, Hops]:
        """Facts, which are all trained, then held-out questions of 2, 3, … hops."""
        return {f"{hops}_hops": Hops(hops, hops == 1) for hops in range(1, self.asked_hops + 1)}

    @property
    def levels(self) -> int:
        """Number of levels: one for each number of hops from 2 to `hops`."""
        return self.hops - 1

    def level_strata(self, level: int) -> Sequence[str]:
        """Return the stratum with the level's largest number of hops."""
        return [f"{level + 2}_hops"]

    @cached_property
    def tails(self) -> np.ndarray:
        """Entity that (relation, entity) leads to; every row is a permutation."""
        generator = random.Random(keyed_integer("permutation_hops graph", self.graph_seed))
        tails = np.empty((self.relations, self.entities), dtype=np.int64)
        for row in tails:
            unused = list(range(self.entities))
            row[:] = [unused.pop(int(generator.random() * len(unused))) for _ in range(len(row))]
        assert (np.sort(tails) == np.arange(self.entities)).all(), "a relation is not a permutation"
        return tails

    def level_examples(self, level: int) -> int:
        """Return `fact_weight` times the number of facts, plus the trained questions."""
        return self._facts + (level + 1) * self.trained_questions

    @property
    def _facts(self) -> int:
        return self.fact_weight * self.entities * self.relations

    def choose(self, generator: random.Random, level: int) -> Hops:
        """Choose a stratum, weighted by its questions; every fact counts `fact_weight` times."""
        drawn = generator.random() * self.level_examples(level) - self._facts
        return Hops(1 if drawn < 0 else 2 + int(drawn / self.trained_questions), True)

    def draw(self, generator: random.Random, stratum: Hops) -> Path:
        """Draw a trained question, or, for facts and untrained strata, any path; uniformly."""
        hops, trained = stratum
        if hops == 1 or not trained:
            return self._path(generator, hops)
        number = int(generator.random() * self.trained_questions)
        own = random.Random(keyed_integer("permutation_hops", self.graph_seed, hops, number))
        while self.is_held_out(question := self._path(own, hops)):
            pass
        return question

    def _path(self, generator: random.Random, hops: int) -> Path:
        entity = int(generator.random() * self.entities)
        return Path(entity, tuple(int(generator.random() * self.relations) for _ in range(hops)))

    def identity(self, question: Path) -> tuple[int, ...]:
        """Return the entity and the relations."""
        return (question.entity, *question.relations)

    def is_held_out(self, question: Path) -> bool:
        """Return whether a question is asked and never trained; all facts are trained."""
        return len(question.relations) > 1 and Task.is_held_out(self, question)

    def held_out_questions(self, count: int, stratum: Hops, *, seed: int = 0) -> list[Path]:
        """Return `count` questions of a stratum: trained ones if it is trained, else held-out."""
        if not stratum.trained:
            return Task.held_out_questions(self, count, stratum, seed=seed)
        generator = random.Random(self.exam_key(seed, stratum))
        return [self.draw(generator, stratum) for _ in range(count)]

    def encode(self, question: Path) -> Example:
        """Return the entity and the relations; the answer is the entity they lead to."""
        reached = self.reached(question)
        relations = [self.entities + relation for relation in question.relations]
        return Example.of_sequence([question.entity, *relations], [reached[-1]])

    def reached(self, question: Path) -> list[int]:
        """Return the entity after every hop."""
        entity, reached = question.entity, []
        for relation in question.relations:
            entity = int(self.tails[relation, entity])
            reached.append(entity)
        return reached

    def waypoints(self, question: Path) -> Mapping[str, tuple[int, int]]:
        """Return the entity after every hop, at its relation; the last is the target."""
        *bridges, target = enumerate(self.reached(question), start=1)
        return {f"hop_{hop}": (hop, entity) for hop, entity in bridges} | {"target": target}
