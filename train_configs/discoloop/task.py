"""Questions of several hops over two knowledge graphs whose facts are learned, not shown.

    a r1 b            atomic fact: the edge r1 leads from entity a to b; all facts are trained
    a r1 r2 c         two hops, a → b → c; some chains of graph A are trained, none of graph B
    a r1 r2 r3 d      three hops, likewise

A and B have the same relations and no entity in common. Stratum `id_K` asks chains of K hops in A
that were not trained; `ood_K` asks chains in B, whose facts were never composed in training.
Results depend on φ, the number of trained chains per fact of A: report it with every result.

Written as words, a fact reads `Ada 's r3 is Bo` and a question `Ada 's r3 's r1 is Cy` (direct) or
`Who is the r1 of the r3 of Ada ? Answer : Cy` (reverse); every name is one token.

Source: DiscoLoop, arXiv 2607.00341, sections 2, 3.1 and 5 and Appendix (three hops). The paper does
not publish its template of tokens; here the symbolic form has no separators. Deviation: trained
chains are chosen by hash, so φ times the facts is only their expected number.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

from titan_loop.data.keyed import keyed_uniform
from titan_loop.data.tasks.task import Example, Task
from titan_loop.errors import UserError

from ..knowledge_graph import check_graph, draw_edges

Form = Literal["symbolic", "direct", "reverse"]
MOST_HOPS = 3
_WORDS = ("'s", "is", "Who", "the", "of", "?", "Answer", ":")
_FEWEST_TRAINED = 10
"""Smallest expected number of trained chains of a length; the exam draws until it meets them."""

_MOST_TRAINED = 0.9
"""Largest share of A's chains that may be trained; the rest is the exam."""


class Split(NamedTuple):
    """The chains that an exam or training draws from.

    Attributes:
        graph: 0 for A, 1 for B.
        hops: Number of relations.
        trained: Whether training uses the chains.
    """

    graph: int
    hops: int
    trained: bool


class Chain(NamedTuple):
    """A path: its relations and its entities, one more than relations; the last is the answer."""

    graph: int
    entities: tuple[int, ...]
    relations: tuple[int, ...]


@dataclass(frozen=True)
class TwoGraph(Task):
    """The task with `entities` per graph, each with `degree` edges of distinct relations.

    Token ids: entities of A, entities of B, relations, then the words of the English forms.

    Raises:
        UserError: A value is out of range, relations do not fit the degree, or φ leaves too few
            chains for the exam.
    """

    name: ClassVar[str] = "two_graph"

    entities: int = 500
    """Entities of each graph."""

    relations: int = 50
    """Relations, shared by both graphs."""

    degree: int = 10
    """Edges that leave every entity, each with another relation."""

    hops: int = 2
    """Hops of the longest chains, 2 or 3; with 3, chains of both lengths are equally frequent."""

    inferred_ratio: float = 2.0
    """φ: trained chains of A, of all lengths, per fact of A."""

    form: Form = "symbolic"
    """symbolic, or English: direct or reverse order of relations."""

    graph_seed: int = 0
    """Seed of the edges."""

    def __post_init__(self) -> None:
        check_graph(
            "TwoGraph", entities=self.entities, relations=self.relations, degree=self.degree
        )
        if not 2 <= self.hops <= MOST_HOPS:
            raise UserError(f"TwoGraph hops {self.hops} must be 2 or {MOST_HOPS}")
        if self.form not in ("symbolic", "direct", "reverse"):
            raise UserError(f"TwoGraph form {self.form!r} must be symbolic, direct or reverse")
        least = _FEWEST_TRAINED * (self.hops - 1) / (self.entities * self.degree)
        most = _MOST_TRAINED * self.degree * (self.hops - 1)
        if not least <= self.inferred_ratio <= most:
            raise UserError(
                f"TwoGraph inferred_ratio {self.inferred_ratio:g} must be at least {least:g} and "
                f"at most {most:g}, or too few of A's chains are trained, or left for the exam"
            )

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        words = 0 if self.form == "symbolic" else len(_WORDS)
        return 2 * self.entities + self.relations + words

    @property
    def longest_example(self) -> int:
        """Tokens of a question of `hops` hops with its answer."""
        if self.form == "symbolic":
            return self.hops + 2
        return 2 * self.hops + 3 if self.form == "direct" else 3 * self.hops + 7

    @property
    def strata(self) -> Mapping[str, Split]:
        """Facts, then trained, held-out and out-of-distribution chains of every length."""
        kinds = {"train": (0, True), "id": (0, False), "ood": (1, False)}
        return {"atomic": Split(0, 1, trained=True)} | {
            f"{kind}_{hops}": Split(graph, hops, trained)
            for hops in range(2, self.hops + 1)
            for kind, (graph, trained) in kinds.items()
        }

    def choose(self, generator: random.Random, level: int) -> Split:
        """Choose facts and chains at 2 : φ, as if examples were drawn uniformly from A and B."""
        if generator.random() * (2 + self.inferred_ratio) < 2:
            return Split(0, 1, trained=True)
        return Split(0, 2 + int(generator.random() * (self.hops - 1)), trained=True)

    def draw(self, generator: random.Random, stratum: Split) -> Chain:
        """Draw a path from a uniform entity along uniform edges."""
        graph = stratum.graph
        if stratum.hops == 1:  # facts are of both graphs
            graph = int(generator.random() * 2)
        entity = graph * self.entities + int(generator.random() * self.entities)
        entities, relations = [entity], []
        for _ in range(stratum.hops):
            relation, entity = self.edges[entity][int(generator.random() * self.degree)]
            relations.append(relation)
            entities.append(entity)
        return Chain(graph, tuple(entities), tuple(relations))

    @cached_property
    def edges(self) -> list[list[tuple[int, int]]]:
        """The (relation, entity) pairs of every entity; entities of A come first, then B's."""
        return draw_edges(
            "two_graph edges",
            self.graph_seed,
            entities=self.entities,
            relations=self.relations,
            degree=self.degree,
            graphs=2,
        )

    def identity(self, question: Chain) -> tuple[int, ...]:
        """Return the first entity and the relations; they determine the others."""
        return (question.entities[0], *question.relations)

    def is_held_out(self, question: Chain) -> bool:
        """Return whether a chain is never trained on: all of B's, and A's by hash."""
        hops = len(question.relations)
        if hops == 1 or question.graph == 1:
            return hops > 1
        drawn = keyed_uniform(self.name, self.graph_seed, self.identity(question))
        return drawn >= self._trained_share(hops)

    def held_out_questions(self, count: int, stratum: Split, *, seed: int = 0) -> list[Chain]:
        """Return `count` questions of a stratum; trained ones if the stratum is trained."""
        if not stratum.trained:
            return super().held_out_questions(count, stratum, seed=seed)
        generator = random.Random(self.exam_key(seed, tuple(stratum)))
        questions: list[Chain] = []
        while len(questions) < count:
            question = self.draw(generator, stratum)
            if not self.is_held_out(question):
                questions.append(question)
        return questions

    def _trained_share(self, hops: int) -> float:
        """Return the share of A's chains of this length that is trained."""
        chains = self.entities * self.degree**hops
        return self.inferred_ratio * self.entities * self.degree / (self.hops - 1) / chains

    def encode(self, question: Chain) -> Example:
        """Return the question in the task's form; its answer is the last entity."""
        subject, answer = question.entities[0], question.entities[-1]
        relations = [2 * self.entities + relation for relation in question.relations]
        if self.form == "symbolic":
            return Example.of_sequence([subject, *relations], [answer])
        if self.form == "direct" or len(relations) == 1:
            path = [token for relation in relations for token in (self._word("'s"), relation)]
            return Example.of_sequence([subject, *path, self._word("is")], [answer])
        asked = [self._word("Who"), self._word("is")]
        for relation in reversed(relations):
            asked += [self._word("the"), relation, self._word("of")]
        asked += [subject, *(self._word(word) for word in ("?", "Answer", ":"))]
        return Example.of_sequence(asked, [answer])

    def waypoints(self, question: Chain) -> Mapping[str, tuple[int, int]]:
        """As in the base class; a bridge is an entity on the way, at the relation that leads to it.

        The reverse form asks the last relation first, so it has no bridges.
        """
        target = Task.waypoints(self, question)
        if self.form == "reverse":
            return target
        apart = 1 if self.form == "symbolic" else 2  # tokens from one relation to the next
        bridges = enumerate(question.entities[1:-1], start=1)
        return {**{f"bridge_{hop}": (apart * hop, entity) for hop, entity in bridges}, **target}

    def _word(self, word: str) -> int:
        return 2 * self.entities + self.relations + _WORDS.index(word)
