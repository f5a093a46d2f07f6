"""Questions of several hops about people whose relations are learned, not shown.

    The r7 of p12 is p131                                   fact: layer 0 → layer 1
    Who is the r3 of the r0 of the r7 of p12 ? Answer : p340      three hops, layer 0 → layer 3

People stand in layers; every relation leads from each of them to one person of the next layer.
Questions start in the first layer, so there are entities · relations^hops of them. A fixed number
of them is trained together with all facts; the exam asks others. More loops should need fewer.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §6 and Appendix B: 5 layers of 100 people, 20
relations, three hops (800,000 questions), 20,000 to 200,000 of them trained, 3,000 held out. The
share of facts in training is not published; here every fact and question is equally likely.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np

from titan_loop.data.keyed import KeyedPermutation, keyed_integer
from titan_loop.data.tasks.task import Example, Task, require_sizes
from titan_loop.errors import UserError

_WORDS = ("The", "Who", "is", "the", "of", "?", "Answer", ":")
_MOST_QUESTIONS = 1 << 24
"""Two tables of 8 bytes per question are kept."""


class PathQuestion(NamedTuple):
    """A person, the relations in the order in which they are followed, and the person reached."""

    person: int
    relations: tuple[int, ...]
    answer: int


@dataclass(frozen=True)
class LayeredQA(Task):
    """The task with `layers` layers of `people` each.

    Token ids: people by layer, relations, then the words of the templates.

    Raises:
        UserError: The layers are too few for the hops, or no question is left for the exam.
    """

    name: ClassVar[str] = "layered_qa"

    layers: int = 5
    """Layers of people; relations lead from each to the next."""

    people: int = 100
    """People in a layer."""

    relations: int = 20
    """Relations of every person."""

    hops: int = 3
    """Relations in a question."""

    trained_questions: int = 200_000
    """Different questions to train on."""

    world_seed: int = 0
    """Seed of the relations between people, and of the trained questions."""

    def __post_init__(self) -> None:
        require_sizes(self, people=1, relations=1, trained_questions=1)
        if not 2 <= self.hops < self.layers:
            raise UserError(
                f"LayeredQA hops {self.hops} must be at least 2 and below its {self.layers} layers"
            )
        count = self._count
        if count > _MOST_QUESTIONS:
            raise UserError(
                f"LayeredQA has {count} questions, more than {_MOST_QUESTIONS}: lower its people, "
                "relations or hops"
            )
        if self.trained_questions >= count:
            raise UserError(
                f"LayeredQA trained_questions {self.trained_questions} must be below {count}, the "
                "number of its questions, or none is left for the exam"
            )

    @property
    def _count(self) -> int:
        return self.people * self.relations**self.hops

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.layers * self.people + self.relations + len(_WORDS)

    @property
    def longest_example(self) -> int:
        """Tokens of a question with its answer."""
        return 3 * self.hops + 7

    @property
    def strata(self) -> Mapping[str, str]:
        """Facts, trained questions and held-out questions."""
        hops = f"{self.hops}_hops"
        return {"facts": "facts", f"trained_{hops}": "trained", f"held_out_{hops}": "held_out"}

    def choose(self, generator: random.Random, level: int) -> str:
        """Choose as if all facts and trained questions were drawn uniformly."""
        facts = (self.layers - 1) * self.people * self.relations
        drawn = generator.random() * (facts + self.trained_questions)
        return "facts" if drawn < facts else "trained"

    def draw(self, generator: random.Random, stratum: str) -> PathQuestion:
        """Draw a fact, a trained question or a held-out one, uniformly."""
        if stratum == "facts":
            person = int(generator.random() * (self.layers - 1) * self.people)
            return self._asked(person, (int(generator.random() * self.relations),))
        first, last = self._splits[stratum]
        number = int(self._order[first + int(generator.random() * (last - first))])
        relations = []
        for _ in range(self.hops):
            number, relation = divmod(number, self.relations)
            relations.append(relation)
        return self._asked(number, tuple(relations))

    @cached_property
    def _splits(self) -> Mapping[str, tuple[int, int]]:
        """First place in `_order`, and the place behind the last, of each kind of question."""
        return {
            "trained": (0, self.trained_questions),
            "held_out": (self.trained_questions, self._count),
        }

    def _asked(self, person: int, relations: tuple[int, ...]) -> PathQuestion:
        answer = person
        for relation in relations:
            answer = int(self.world[answer, relation])
        return PathQuestion(person, relations, answer)

    @cached_property
    def world(self) -> np.ndarray:
        """Person reached by each (person outside the last layer, relation), int64."""
        generator = random.Random(keyed_integer("layered_qa world", self.world_seed))
        heads = (self.layers - 1) * self.people
        return np.array(
            [
                [
                    (head // self.people + 1) * self.people + int(generator.random() * self.people)
                    for _ in range(self.relations)
                ]
                for head in range(heads)
            ]
        )

    @cached_property
    def _order(self) -> np.ndarray:
        """Question numbers, the trained ones first."""
        permutation = KeyedPermutation(
            self._count, keyed_integer("layered_qa questions", self.world_seed)
        )
        return permutation(np.arange(self._count)).astype(np.int64)

    @cached_property
    def _rank(self) -> np.ndarray:
        """Place of every question number in `_order`."""
        rank = np.empty(self._count, dtype=np.int64)
        rank[self._order] = np.arange(self._count)
        return rank

    def identity(self, question: PathQuestion) -> tuple[int, ...]:
        """Return the person and the relations; they determine the answer."""
        return (question.person, *question.relations)

    def is_held_out(self, question: PathQuestion) -> bool:
        """Return whether a question is never trained on; all facts are trained on."""
        if len(question.relations) == 1:
            return False
        number = question.person
        for relation in reversed(question.relations):
            number = number * self.relations + relation
        return bool(self._rank[number] >= self.trained_questions)

    def held_out_questions(self, count: int, stratum: str, *, seed: int = 0) -> list[PathQuestion]:
        """Return `count` questions of a stratum; only `held_out` ones are never trained on."""
        generator = random.Random(self.exam_key(seed, stratum))
        return [self.draw(generator, stratum) for _ in range(count)]

    def encode(self, question: PathQuestion) -> Example:
        """Return the fact, or the question with its last relation first."""
        relations = [self.layers * self.people + relation for relation in question.relations]
        if len(relations) == 1:
            prompt = [self._word("The"), relations[0], self._word("of"), question.person]
            return Example.of_sequence([*prompt, self._word("is")], [question.answer])
        prompt = [self._word("Who"), self._word("is")]
        for relation in reversed(relations):
            prompt += [self._word("the"), relation, self._word("of")]
        prompt += [question.person, *(self._word(word) for word in ("?", "Answer", ":"))]
        return Example.of_sequence(prompt, [question.answer])

    def _word(self, word: str) -> int:
        return self.layers * self.people + self.relations + _WORDS.index(word)
