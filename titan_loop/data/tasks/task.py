"""The interface of a generated task: examples, an exam, a curriculum.

    generator ─► question ─ identity ─► keyed hash ─┬─ held out ─► exam, by stratum
                    │                               └─ else ─────► training
                    └─ encode ─► Example: columns of one length ─► windows

Whether an example is held out depends on its content alone, so training passes over it however
often it is drawn. A task is a frozen dataclass whose fields are its parameters; a plug-in gives it
its name. Nothing here needs torch.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import numpy as np

from titan_loop.data.columns import Column
from titan_loop.data.keyed import keyed_integer
from titan_loop.data.labels import IGNORED
from titan_loop.errors import UserError

_MOST_DRAWS = 20  # times as many as expected
_MOST_TRAINING_DRAWS = 100_000  # a task may train one in a thousand of its questions
_SPARE = 2  # times as many questions are drawn as asked, since some are drawn twice


@dataclass(frozen=True, slots=True)
class Example:
    """One example of T positions: tokens and labels (int64) and a mask, (T,) each.

    Attributes:
        labels: Target of every position; IGNORED where there is none.
        answer: Whether a label belongs to the answer, which alone is graded and, by default,
            trained on.
        columns: Values of the task's columns, by name: (T, …), or one value if not per token.
        steps: Recurrent steps that the question needs; 0 if unknown.
    """

    tokens: np.ndarray
    labels: np.ndarray
    answer: np.ndarray
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        lengths = {len(part) for part in (self.tokens, self.labels, self.answer)}
        assert len(lengths) == 1, lengths

    @classmethod
    def of_tokens(cls, tokens: Sequence[int], answers: Collection[int]) -> "Example":
        """Return the example of a model that predicts the next token.

        `answers` are the positions whose next token belongs to the answer.
        """
        ids = np.asarray(tokens, dtype=np.int64)
        graded = np.zeros(len(ids), dtype=bool)
        graded[[*answers]] = True
        return cls(ids, np.append(ids[1:], IGNORED), graded)

    @classmethod
    def of_sequence(cls, prompt: Sequence[int], answer: Sequence[int]) -> "Example":
        """Return the example of a prompt followed by its answer."""
        end = len(prompt) - 1
        return cls.of_tokens([*prompt, *answer], range(end, end + len(answer)))

    def answer_labels(self) -> np.ndarray:
        """Return the labels of the answer; IGNORED elsewhere."""
        return np.where(self.answer, self.labels, IGNORED)


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Measure of an exam of facts: the bits of them that a model knows.

    Attributes:
        items: Number of items in training, such as people; an exam's examples are items.
        bits: Bits of one item's answer under a uniform guess, by stratum.
    """

    items: int
    bits: Mapping[str, float]


@dataclass(frozen=True)
class Task(ABC):
    """Examples drawn from a keyed generator, and an exam of examples never trained on.

    Only the task looks into a *question*. A *stratum* is a kind of question that the exam counts on
    its own, such as a number of hops; a *level* is the part that a curriculum trains on at a time.

    Attributes:
        name: Name in recipes, suites and reports.
        held_out_one_in: One in this many examples, chosen by hash, is set aside for the exam.
        knows_depth: Whether `depth` returns the recurrent steps that a question needs.
    """

    name: ClassVar[str]
    columns: ClassVar[tuple[Column, ...]] = ()
    held_out_one_in: ClassVar[int] = 64
    knows_depth: ClassVar[bool] = False

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def model_options(self) -> Mapping[str, tuple[int, ...]]:
        """Model options, beside `vocab_size`, that follow from the task: name → least values."""
        return {}

    @property
    @abstractmethod
    def longest_example(self) -> int:
        """Positions of the longest example of training."""

    @property
    @abstractmethod
    def strata(self) -> Mapping[str, Any]:
        """Strata of the exam: name → argument of `draw`, from easy to hard."""

    @abstractmethod
    def choose(self, generator: random.Random, level: int) -> Any:
        """Choose the stratum of the next training example of a level, 0 … `levels` - 1.

        Use the generator's `random()` alone: Python guarantees it across versions.
        """

    @abstractmethod
    def draw(self, generator: random.Random, stratum: Any) -> Any:
        """Draw a question of a stratum, held out or not."""

    @abstractmethod
    def identity(self, question: Any) -> tuple[object, ...]:
        """Return the strings and integers that two equal questions share."""

    @abstractmethod
    def encode(self, question: Any) -> Example:
        """Return the example that asks and answers the question."""

    @property
    def end(self) -> int | None:
        """Token that ends an answer; None if it ends after the right answer's tokens."""
        return None

    @property
    def answer_limit(self) -> int | None:
        """Tokens that an answer may have; None for the right answer's."""
        return None

    def grade(self, question: Any, answer: list[int]) -> float:
        """Return the reward of an answer's tokens: 1 for the right ones, else 0."""
        example = self.encode(question)
        return float(answer == example.labels[example.answer].tolist())

    def waypoints(self, question: Any) -> Mapping[str, tuple[int, int]]:
        """Return the tokens that lead to the answer: name → (position, token id), in order.

        The last is "target", the first token of the answer.
        """
        example = self.encode(question)
        at = int(np.flatnonzero(example.answer)[0])
        return {"target": (at, int(example.labels[at]))}

    def depth(self, question: Any) -> int:
        """Return the recurrent steps that a question needs, where `knows_depth`."""
        raise NotImplementedError

    @property
    def most_steps(self) -> int | None:
        """Largest depth of a training question, if there is one."""
        return None

    @property
    def knowledge(self) -> Knowledge | None:
        """Facts to be learned by heart; None for a task without facts."""
        return None

    @property
    def levels(self) -> int:
        """Levels of a curriculum, from easy to hard; without one the last is trained on."""
        return 1

    def level_strata(self, level: int) -> Sequence[str]:
        """Return the strata of the exam that has to be passed to leave a level."""
        return list(self.strata)

    def level_examples(self, level: int) -> int:
        """Return the number of training examples of a level, an epoch; 0 if there is no end."""
        return 0

    def exam_key(self, seed: int, stratum: Any) -> int:
        """Return the key that the questions of an exam are drawn from."""
        return keyed_integer(f"{self.name} exam", seed, stratum)

    def is_held_out(self, question: Any) -> bool:
        """Return whether a question belongs to the exam; a function of its identity alone."""
        return keyed_integer(self.name, self.identity(question)) % self.held_out_one_in == 0

    def questions(self, key: int, level: int = 0) -> Iterator[Any]:
        """Yield training questions of a level without end, none held out."""
        generator = random.Random(key)
        while True:
            stratum = self.choose(generator, level)
            for _ in range(_MOST_TRAINING_DRAWS):
                question = self.draw(generator, stratum)
                if not self.is_held_out(question):
                    yield question
                    break
            else:
                raise UserError(
                    f"task {self.name}: all are held out, no example of {stratum} is left to train "
                    f"on; enlarge {self}"
                )

    def held_out_questions(self, count: int, stratum: Any, *, seed: int = 0) -> list[Any]:
        """Return `count` questions of a stratum, none ever trained on, with repetitions."""
        generator = random.Random(self.exam_key(seed, stratum))
        questions: list[Any] = []
        for _ in range(_MOST_DRAWS * self.held_out_one_in * count):
            question = self.draw(generator, stratum)
            if self.is_held_out(question):
                questions.append(question)
                if len(questions) == count:
                    return questions
        raise UserError(
            f"{self} has too few examples of {stratum} for an exam of {count}: enlarge it"
        )

    def check_exam(self, count: int, *, strata: Sequence[str] | None = None) -> None:
        """Raise `UserError` if a stratum has too few examples for an exam of `count`."""
        for name in self.strata if strata is None else strata:
            _draw_questions(self, count, name)

    def exam(self, count: int, *, strata: Sequence[str] | None = None) -> dict[str, list[Example]]:
        """Return at most `count` different held-out examples of each stratum, or some `strata`."""
        exam = {}
        for name in self.strata if strata is None else strata:
            drawn = self.held_out_questions(_SPARE * count, self.strata[name])
            distinct = {self.identity(question): question for question in drawn}
            exam[name] = [self.encode(question) for question in [*distinct.values()][:count]]
        return exam


def require_sizes(task: Task, **least: int) -> None:
    """Raise `UserError` for the first parameter of a task that is below its least value."""
    for name, smallest in least.items():
        if (value := getattr(task, name)) < smallest:
            raise UserError(f"{type(task).__name__} {name} {value} must be at least {smallest}")


@cache  # equal exams are drawn once; an error is not cached
def _draw_questions(task: Task, count: int, stratum: str) -> None:
    task.held_out_questions(count, task.strata[stratum])
