"""`PermutationHops` in English words, with any tokenizer: for models that were trained on text.

    The guide of Anna is Peter                    fact
    The rival of the guide of Anna is Mark        two hops: first `guide`, then `rival`

`EnglishHops` has one graph, whose facts are learned by heart. `ToldHops` tells the facts of a new
graph before it asks. Every name must be one token, so that every answer is one.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from titan_loop.data.keyed import keyed_integer
from titan_loop.data.tasks.task import Example, Task, require_sizes
from titan_loop.errors import UserError

from ..recurrent_depth.permutation_hops import Hops, Path, PermutationHops

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAMES = (
    *("Anna", "Peter", "Mark", "Julia", "Simon", "Laura", "David", "Clara", "Martin", "Helen"),
    *("Oscar", "Emma", "James", "Alice", "Robert", "Maria", "Thomas", "Sarah", "Daniel", "Lucy"),
)
RELATIONS = ("friend", "teacher", "rival", "neighbor", "doctor", "guide", "partner", "boss")
_WORDS = ("The", "the", "of", "is", *RELATIONS, *NAMES)


@dataclass(frozen=True)
class EnglishHops(PermutationHops):
    """The task in the tokens of `tokenizer`, whose file is read on first use.

    Raises:
        UserError: As in the base class, or if there are fewer names or relations than asked for. On
            first use: the tokenizer splits a name.
    """

    name: ClassVar[str] = "english_hops"

    tokenizer: str = ""
    """A tokenizer.json in which every name, with the space before it, is one token; empty: every
    word of the task is a token of its own."""

    entities: int = 12
    relations: int = 4
    hops: int = 3
    asked_hops: int = 6
    trained_questions: int = 300
    fact_weight: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, words in (("entities", NAMES), ("relations", RELATIONS)):
            if getattr(self, field) > len(words):
                raise UserError(
                    f"EnglishHops {field} {getattr(self, field)} must be at most {len(words)}"
                )

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        from titan_loop.text.tokenizer import load_tokenizer

        return load_tokenizer(self.tokenizer)

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        if not self.tokenizer:
            return [_WORDS.index(word) for word in text.split()]
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    @cached_property
    def names(self) -> list[int]:
        """Token ids of the entities."""
        ids = [self.ids(f" {name}") for name in NAMES[: self.entities]]
        if split := [name for name, tokens in zip(NAMES, ids, strict=False) if len(tokens) > 1]:
            raise UserError(
                f"EnglishHops tokenizer {self.tokenizer} splits {', '.join(split)}: every name "
                "must be one token; use a larger vocabulary of English"
            )
        return [token for (token,) in ids]

    @property
    def vocab_size(self) -> int:
        """Size of the tokenizer's vocabulary; without a tokenizer, the number of words."""
        return self._tokenizer.get_vocab_size() if self.tokenizer else len(_WORDS)

    @property
    def longest_example(self) -> int:
        """Tokens of a question of `asked_hops` hops with its answer."""
        longest = max(range(self.relations), key=lambda r: len(self.ids(f" {RELATIONS[r]}")))
        return len(self.encode(Path(0, (longest,) * self.asked_hops)).tokens)

    def text(self, question: Path) -> str:
        """Return a question without its answer."""
        named = [f"{RELATIONS[relation]} of" for relation in reversed(question.relations)]
        return f"The {' the '.join(named)} {NAMES[question.entity]} is"

    def encode(self, question: Path) -> Example:
        """Return the question and its answer as text."""
        answer = self.names[self.reached(question)[-1]]
        return Example.of_sequence(self.ids(self.text(question)), [answer])

    def waypoints(self, question: Path) -> Mapping[str, tuple[int, int]]:
        """Return the target only: the text does not name the entities between the hops."""
        return Task.waypoints(self, question)


class Told(NamedTuple):
    """Questions on the facts of one graph, which are told before them.

    Attributes:
        graph: Its `graph_seed`.
        paths: The questions, in order.
    """

    graph: int
    paths: tuple[Path, ...]


@dataclass(frozen=True)
class _Graph(EnglishHops):
    held_out_one_in: ClassVar[int] = 1  # `ToldHops` sets whole graphs aside instead


@dataclass(frozen=True)
class ToldHops(Task):
    """All facts of a graph in English, a line each in random order, and questions on them.

    Training asks `told_questions` questions of 1 … `hops` hops on the same facts; the exam asks
    one, of up to `asked_hops` hops. A graph of the exam is never trained. Since all facts are told
    and every relation is a permutation, the last hops alone do not tell the answer.

    Raises:
        UserError: As `EnglishHops`, or there is no question.
    """

    name: ClassVar[str] = "told_hops"

    tokenizer: str = ""
    """As in `EnglishHops`."""

    entities: int = 8
    relations: int = 3
    hops: int = 3
    asked_hops: int = 6

    told_questions: int = 6
    """Questions of a training example."""

    def __post_init__(self) -> None:
        require_sizes(self, entities=2, relations=1, told_questions=1)
        if not 2 <= self.hops <= self.asked_hops:
            raise UserError(
                f"ToldHops hops {self.hops} must be at least 2 and at most its asked_hops "
                f"{self.asked_hops}"
            )
        _ = self._english  # checks that there are words for all

    @cached_property
    def _english(self) -> _Graph:
        return _Graph(
            tokenizer=self.tokenizer,
            entities=self.entities,
            relations=self.relations,
            hops=self.hops,
            asked_hops=self.asked_hops,
        )

    @property
    def vocab_size(self) -> int:
        """As in `EnglishHops`."""
        return self._english.vocab_size

    @property
    def longest_example(self) -> int:
        """Tokens of a training example whose questions all have `hops` hops."""
        words = [len(self._english.ids(f" {relation}")) for relation in RELATIONS[: self.relations]]
        longest = words.index(max(words))
        fact, question = (
            len(self._english.ids("\n" + self._english.text(Path(0, (longest,) * hops)))) + 1
            for hops in (1, self.hops)
        )
        return self.entities * self.relations * fact + self.told_questions * question

    @property
    def strata(self) -> Mapping[str, Hops]:
        """Questions of 1, 2, 3, … hops on graphs that were not trained."""
        return {f"{hops}_hops": Hops(hops, False) for hops in range(1, self.asked_hops + 1)}

    def choose(self, generator: random.Random, level: int) -> Hops:
        """Return the only stratum of training; `draw` mixes the numbers of hops."""
        return Hops(self.hops, True)

    def draw(self, generator: random.Random, stratum: Hops) -> Told:
        """Draw a graph, and the questions of a training example or the one of an exam."""

        def below(n: int) -> int:
            return int(generator.random() * n)

        graph = below(2**40)
        count = self.told_questions if stratum.trained else 1
        each = [1 + below(stratum.hops) if stratum.trained else stratum.hops for _ in range(count)]
        paths = [
            Path(below(self.entities), tuple(below(self.relations) for _ in range(hops)))
            for hops in each
        ]
        return Told(graph, tuple(paths))

    def identity(self, question: Told) -> tuple[int, ...]:
        """Return the graph: none is both trained and asked."""
        return (question.graph,)

    def encode(self, question: Told) -> Example:
        """Return the facts, then the questions with their answers, a line each."""
        graph = replace(self._english, graph_seed=question.graph)
        order = random.Random(keyed_integer(self.name, question.graph))
        pairs = product(range(self.entities), range(self.relations))
        facts = [Path(entity, (r,)) for entity, r in sorted(pairs, key=lambda _: order.random())]
        tokens: list[int] = []
        answers: list[int] = []
        for number, path in enumerate([*facts, *question.paths]):
            tokens += self._english.ids("\n" * (number > 0) + self._english.text(path))
            if number >= len(facts):
                answers.append(len(tokens) - 1)
            tokens.append(self._english.names[graph.reached(path)[-1]])
        return Example.of_tokens(tokens, answers)
