"""Capo: made-up biographies to be learned by heart, and the bits of them that a model knows.

    <bos> Anya Bo Cid was born on May 7 1982 . She comes from c17 . She studied at u4 . …

A person has a name of three parts and six attributes: gender, birth date, birth city, university,
major and employer, each drawn uniformly. A biography says the attributes in this order, every time
in other words; gender is the first pronoun. Nothing is held out: the exam asks for people that were
trained, and measures the nats of their names and of their values. With p₁ and p₂ those nats, summed
over a person's tokens and averaged over people,

    bits = N log₂(N₀ e^{−p₁}) + N log₂(S₀ e^{−p₂})

| symbol | code |
|---|---|
| N | `people` |
| N₀ | `first_names` · `middle_names` · `last_names` |
| S₀ | 2 · (12 · 28 · `years`) · `cities` · `universities` · `majors` · `employers` |

A uniform guess knows 0 bits; knowing everybody is N log₂(N₀/N) + N log₂ S₀ bits.

Source: Allen-Zhu and Li 2024, "Physics of Language Models, part 3.3" (bioS); values of Zhu et al.
2025 (Ouro), arXiv 2510.25741, Appendix B.1, whose formula prints e^{p₂} where e^{−p₂} is meant.
Deviations: names, values and words are single tokens of a vocabulary of their own, a birth date
three; no two people have the same name; sentences keep their order; people are drawn with
replacement, so that their exposures scatter as a Poisson number (3 % around 1,000).
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from titan_loop.data.keyed import KeyedPermutation, keyed_integer
from titan_loop.data.tasks.task import Example, Knowledge, Task, require_sizes
from titan_loop.errors import UserError

Graded = Literal["names", "values", "both"]

_WORDINGS = (
    ("was born on", "came into this world on", "has a birthday on", "first saw daylight on"),
    ("comes from", "was a child in", "spent the first years in", "has a birthplace called"),
    ("studied at", "holds a degree from", "went to lectures at", "was a student of"),
    ("majored in", "specialised in", "took a degree in", "wrote a thesis about"),
    ("works for", "earns a living at", "is employed by", "has a job at"),
)
"""Ways to say birth date, city, university, major and employer of a subject."""

_WORDS = sorted({word for said in _WORDINGS for text in said for word in text.split()})
_FIXED = ("<bos>", ".", *_WORDS)
_GENDERS, _MONTHS, _DAYS = 2, 12, 28
_NAME_PARTS = 3
_POOLS = (
    *("first_names", "middle_names", "last_names"),
    *("genders", "months", "days", "years", "cities", "universities", "majors", "employers"),
)
"""Pools of names and values, in the order of their token ids, which follow the words'."""


class Biography(NamedTuple):
    """A person, the wording of each sentence, and the labels that form the answer."""

    person: int
    wordings: tuple[int, ...]
    graded: Graded


@dataclass(frozen=True)
class Capo(Task):
    """The task with the biographies of `people` people.

    Raises:
        UserError: A number is too small, or there are fewer names than people.
    """

    name: ClassVar[str] = "capo"

    people: int = 20_000
    """Number of people, N."""

    first_names: int = 400
    """Number of first names."""

    middle_names: int = 400
    """Number of middle names."""

    last_names: int = 1000
    """Number of last names."""

    years: int = 200
    """Number of years of birth."""

    cities: int = 200
    """Number of birth cities."""

    universities: int = 300
    """Number of universities."""

    majors: int = 100
    """Number of majors."""

    employers: int = 263
    """Number of employers."""

    world_seed: int = 0
    """Seed of names and attributes."""

    def __post_init__(self) -> None:
        require_sizes(self, people=1, **{pool: 1 for pool in _POOLS if pool in self.__dict__})
        names = math.prod(self._sizes[:_NAME_PARTS])
        if self.people > names:
            raise UserError(
                f"Capo people {self.people} must be at most {names}, the number of names; add "
                "first, middle or last names"
            )

    @property
    def _sizes(self) -> tuple[int, ...]:
        fixed = {"genders": _GENDERS, "months": _MONTHS, "days": _DAYS}
        return tuple(fixed.get(pool) or getattr(self, pool) for pool in _POOLS)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(_FIXED) + sum(self._sizes)

    @property
    def longest_example(self) -> int:
        """Tokens of the longest biography."""
        longest = sum(max(len(text.split()) for text in said) for said in _WORDINGS)
        pronouns_and_stops = 2 * len(_WORDINGS) - 1
        return 1 + _NAME_PARTS + longest + len(_POOLS) - _NAME_PARTS - 1 + pronouns_and_stops

    @property
    def strata(self) -> Mapping[str, Graded]:
        """Names and values of the same people."""
        return {"names": "names", "values": "values"}

    @property
    def knowledge(self) -> Knowledge:
        """Bits of a name and of a person's values."""
        sizes = self._sizes
        names, values = sizes[:_NAME_PARTS], sizes[_NAME_PARTS:]
        bits = {"names": math.log2(math.prod(names)), "values": math.log2(math.prod(values))}
        return Knowledge(items=self.people, bits=bits)

    @cached_property
    def world(self) -> np.ndarray:
        """Value of every person in every pool, int64, shape (N, 11)."""
        sizes = self._sizes
        key = keyed_integer("capo names", self.world_seed)
        number = KeyedPermutation(math.prod(sizes[:_NAME_PARTS]), key)(np.arange(self.people))
        columns = []
        for size in sizes[:_NAME_PARTS]:
            number, part = np.divmod(number, np.uint64(size))
            columns.append(part.astype(np.int64))
        generator = random.Random(keyed_integer("capo values", self.world_seed))
        kinds = sizes[_NAME_PARTS:]
        values = [[int(generator.random() * n) for n in kinds] for _ in range(self.people)]
        return np.column_stack([*columns, np.array(values, dtype=np.int64)])

    def choose(self, generator: random.Random, level: int) -> Graded:
        """Choose names and values, all that is to be learned."""
        return "both"

    def draw(self, generator: random.Random, stratum: Graded) -> Biography:
        """Draw a person and wordings, uniformly."""
        person = int(generator.random() * self.people)
        return Biography(person, self._wordings(generator), stratum)

    def _wordings(self, generator: random.Random) -> tuple[int, ...]:
        return tuple(int(generator.random() * len(said)) for said in _WORDINGS)

    def identity(self, question: Biography) -> tuple[int, ...]:
        """Return the person and the wordings."""
        return question.person, *question.wordings

    def is_held_out(self, question: Biography) -> bool:
        """Return False: the exam asks for facts that were trained."""
        return False

    def held_out_questions(self, count: int, stratum: Graded, *, seed: int = 0) -> list[Biography]:
        """Return biographies of `count` different people, or of all if they are fewer."""
        key = self.exam_key(seed, "people")
        generator = random.Random(key)
        people = KeyedPermutation(self.people, key)(np.arange(min(count, self.people)))
        return [Biography(int(p), self._wordings(generator), stratum) for p in people]

    def encode(self, question: Biography) -> Example:
        """Return the biography; the answer is the name, the values, or both."""
        values = self.world[question.person]
        first_id = len(_FIXED) + np.cumsum((0, *self._sizes[:-1]))
        named: dict[str, int] = dict(zip(_POOLS, (first_id + values).tolist(), strict=True))
        tokens = [_FIXED.index("<bos>")]
        kinds: list[str] = [""]

        def say(kind: str, *ids: int) -> None:
            tokens.extend(ids)
            kinds.extend([kind] * len(ids))

        say("names", *(named[pool] for pool in _POOLS[:_NAME_PARTS]))
        said = (("months", "days", "years"), *((pool,) for pool in _POOLS[-4:]))
        for sentence, (pools, wording) in enumerate(zip(said, question.wordings, strict=True)):
            if sentence > 0:
                say("values" if sentence == 1 else "", named["genders"])
            say("", *map(_FIXED.index, _WORDINGS[sentence][wording].split()))
            say("values", *(named[pool] for pool in pools))
            say("", _FIXED.index("."))
        wanted = ("names", "values") if question.graded == "both" else (question.graded,)
        answers = [place for place, kind in enumerate(kinds[1:]) if kind in wanted]
        return Example.of_tokens(tokens, answers)
