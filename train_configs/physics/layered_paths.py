"""Layered questions whose exam has no twin in training: no question visits the same people.

Two relations of a person often lead to the same other person. `LayeredQA` then trains one question
and asks another that visits the same people in the same order: with 20 people and 8 relations 11 %
of the held-out questions have such a twin in training after 921 trained ones, 59 % after 9,216.
Here twins are trained, reported or tuned with together, and an exam asks one question of a path.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from titan_loop.data.keyed import KeyedPermutation, keyed_integer
from titan_loop.errors import UserError

from .layered_qa import LayeredQA, PathQuestion


@dataclass(frozen=True)
class LayeredPaths(LayeredQA):
    """`LayeredQA`, split by the people that a question visits, with questions for tuning.

    Questions at a border of two splits whose path is on both sides are neither trained nor asked.

    Raises:
        UserError: Also if no path is left to report.
    """

    name: ClassVar[str] = "layered_paths"

    tuning_questions: int = 1_024
    """Questions to choose settings by, about; none of them is in the reported exam."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tuning_questions < 1:
            raise UserError(
                f"LayeredPaths tuning_questions {self.tuning_questions} must be at least 1"
            )
        if any(first >= last for first, last in self._splits.values()):
            raise UserError(
                f"LayeredPaths trained_questions {self.trained_questions} and tuning_questions "
                f"{self.tuning_questions} leave no path for an exam of {self._count} questions: "
                "lower them"
            )

    @property
    def strata(self) -> Mapping[str, str]:
        """Facts, trained questions, held-out questions, and others for tuning."""
        return {**super().strata, f"tuning_{self.hops}_hops": "tuning"}

    @cached_property
    def _people(self) -> np.ndarray:
        """People that every question visits, int64, shape (questions, hops + 1)."""
        number = np.arange(self._count)
        relations = []
        for _ in range(self.hops):
            number, relation = np.divmod(number, self.relations)
            relations.append(relation)
        people = [number]
        for relation in relations:
            people.append(self.world[people[-1], relation])
        return np.stack(people, axis=1)

    @cached_property
    def _path(self) -> np.ndarray:
        """Number of every question's path, in a keyed order."""
        base = self.layers * self.people
        number = self._people @ base ** np.arange(self.hops + 1)
        distinct, path = np.unique(number, return_inverse=True)
        key = keyed_integer("layered_paths", self.world_seed)
        return KeyedPermutation(len(distinct), key)(path.ravel()).astype(np.int64)

    @cached_property
    def _order(self) -> np.ndarray:
        """Question numbers by path, the trained ones first."""
        return np.argsort(self._path, kind="stable")

    @cached_property
    def _splits(self) -> Mapping[str, tuple[int, int]]:
        """First place in `_order`, and the place behind the last, of each split."""
        path = self._path[self._order]

        def after(place: int) -> int:
            """Return the first place whose path does not stand before `place`."""
            return int(np.searchsorted(path, path[place - 1], side="right"))

        held_out, tuning = after(self.trained_questions), self._count - self.tuning_questions
        border = int(np.searchsorted(path, path[max(tuning, 0)], side="left"))
        return {
            "trained": (0, self.trained_questions),
            "held_out": (held_out, border),
            "tuning": (border, self._count),
        }

    def identity(self, question: PathQuestion) -> tuple[int, ...]:
        """Return the people that the question visits."""
        people = [question.person]
        for relation in question.relations:
            people.append(int(self.world[people[-1], relation]))
        return tuple(people)
