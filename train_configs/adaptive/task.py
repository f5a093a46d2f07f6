"""Mano and Capo in one run: arithmetic, which needs depth, and biographies, which need capacity.

    <bos> len_2  + * 3 5 7  <ans> 22   |   <bos> Anya Bo Cid was born on …

Each example is Mano's with a fixed probability, else Capo's, and a window holds examples of both.
The tasks share no token: Capo's ids follow Mano's.

Source: after Frey et al. 2026 (adaptive loops and memory), which compares mathematics and
commonsense; tasks of Zhu et al. 2025 (Ouro), arXiv 2510.25741, §6.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from titan_loop.data.labels import IGNORED
from titan_loop.data.tasks.mano import Mano
from titan_loop.data.tasks.task import Example, Knowledge, Task
from titan_loop.errors import UserError

from ..physics.capo import Capo

_MANO = "mano"


class Part(NamedTuple):
    """A stratum or a question of one of the two tasks."""

    task: str
    of_task: Any


@dataclass(frozen=True)
class ManoCapo(Task):
    """Examples of Mano and of Capo in one vocabulary.

    Raises:
        UserError: `mano_share` is not between 0 and 1, or leaves a task out.
    """

    name: ClassVar[str] = "mano_capo"

    mano: Mano = field(default_factory=Mano)
    capo: Capo = field(default_factory=Capo)

    mano_share: float = 0.5
    """Share of the examples that are Mano's."""

    def __post_init__(self) -> None:
        if not 0 < self.mano_share < 1:
            raise UserError(
                f"ManoCapo mano_share {self.mano_share} must be above 0 and below 1; to train on "
                "one task alone, choose mano or capo"
            )

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.mano.vocab_size + self.capo.vocab_size

    @property
    def longest_example(self) -> int:
        """Tokens of the longest example of either task."""
        return max(self.mano.longest_example, self.capo.longest_example)

    @property
    def strata(self) -> Mapping[str, Part]:
        """Mano's largest expressions, then names and values of Capo's people."""
        (largest,) = self.mano.strata.values()
        capo = {name: Part(Capo.name, stratum) for name, stratum in self.capo.strata.items()}
        return {_MANO: Part(_MANO, largest), **capo}

    @property
    def knowledge(self) -> Knowledge:
        """Capo's knowledge; Mano has none."""
        return self.capo.knowledge

    def _task(self, part: Part) -> Mano | Capo:
        return self.mano if part.task == _MANO else self.capo

    def choose(self, generator: random.Random, level: int) -> Part:
        """Choose a task by the share, and a question of that task."""
        name = _MANO if generator.random() < self.mano_share else Capo.name
        return Part(name, self._task(Part(name, None)).choose(generator, level))

    def draw(self, generator: random.Random, stratum: Part) -> Part:
        """Draw a question from the stratum's own task."""
        return stratum._replace(of_task=self._task(stratum).draw(generator, stratum.of_task))

    def identity(self, question: Part) -> tuple[object, ...]:
        """Return the task, and the question's identity in it."""
        return question.task, *self._task(question).identity(question.of_task)

    def is_held_out(self, question: Part) -> bool:
        """Return whether the task itself holds it out."""
        return self._task(question).is_held_out(question.of_task)

    def held_out_questions(self, count: int, stratum: Part, *, seed: int = 0) -> list[Part]:
        """Return questions of the exam of the stratum's own task."""
        drawn = self._task(stratum).held_out_questions(count, stratum.of_task, seed=seed)
        return [stratum._replace(of_task=question) for question in drawn]

    def encode(self, question: Part) -> Example:
        """Return the task's example, in the vocabulary of both."""
        example = self._task(question).encode(question.of_task)
        if question.task == _MANO:
            return example
        shift = self.mano.vocab_size
        labels = np.where(example.labels == IGNORED, IGNORED, example.labels + shift)
        return replace(example, tokens=example.tokens + shift, labels=labels)
