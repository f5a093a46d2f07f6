"""A value as a function of the global tokens consumed; drives learning rate, R, β and batch size.

A schedule is a list of knots (tokens, value), each with the interpolation used *after* it. Before
the first knot the first value holds, after the last knot the last. The command line reads its text
form, and `str` writes it:

    3e-4                                                   constant
    0:0 linear 2M:3e-4 constant 90M:3e-4 cosine 100M:3e-5  warm-up, plateau, decay

This module imports neither torch nor torchtitan, so that `--help` stays fast.
"""

import bisect
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any, Literal, get_args

from titan_loop.bounds import numbers
from titan_loop.errors import UserError, nearest

if TYPE_CHECKING:
    import tyro

Interpolation = Literal["constant", "linear", "cosine"]

_INTERPOLATIONS: tuple[str, ...] = get_args(Interpolation)
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)([KMBT]?)")


@dataclass(frozen=True, slots=True)
class Knot:
    """A point of a schedule; `interpolation` leads to the next knot ("constant" jumps there)."""

    tokens: int
    value: float
    interpolation: Interpolation = "constant"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A piecewise function of the global token count.

    With t_i ≤ t < t_{i+1} and f = (t − t_i) / (t_{i+1} − t_i) the value is v_i (constant),
    v_i + f (v_{i+1} − v_i) (linear) or v_i + (v_{i+1} − v_i)(1 − cos πf)/2 (cosine).
    """

    knots: tuple[Knot, ...]

    def __post_init__(self) -> None:
        if not self.knots:
            raise UserError("schedule has no knots; give at least one value, such as 3e-4")
        previous = -1
        for knot in self.knots:
            if knot.tokens < 0:
                raise UserError(f"schedule knot tokens={knot.tokens} is negative; start at 0")
            if knot.tokens <= previous:
                problem = f"schedule knot tokens={knot.tokens} does not increase (the one before is"
                raise UserError(f"{problem} {previous}); order the knots by tokens")
            if not math.isfinite(knot.value):
                raise UserError(f"schedule value={knot.value} at {knot.tokens} is not finite")
            if knot.interpolation not in _INTERPOLATIONS:
                known = nearest(str(knot.interpolation), _INTERPOLATIONS)
                raise UserError(f"schedule interpolation={knot.interpolation!r} is unknown{known}")
            previous = knot.tokens
        # The last knot's interpolation is never used: drop it, so equal schedules compare equal.
        last = self.knots[-1]
        object.__setattr__(self, "knots", (*self.knots[:-1], Knot(last.tokens, last.value)))

    def __call__(self, tokens: int) -> float:
        """Return the value after `tokens` global tokens; on a knot, exactly the knot's value."""
        index = self._knot_before(tokens)
        knot = self.knots[max(index, 0)]
        # The last knot is constant, too.
        if index < 0 or knot.interpolation == "constant":
            return knot.value
        following = self.knots[index + 1]
        fraction = (tokens - knot.tokens) / (following.tokens - knot.tokens)
        if knot.interpolation == "cosine":
            fraction = (1.0 - math.cos(math.pi * fraction)) / 2.0
        return knot.value + fraction * (following.value - knot.value)

    def constant_until(self, tokens: int) -> int | None:
        """Return the first token count after `tokens` where the value may differ, None for never.

        While the value moves, the result is `tokens + 1`.
        """
        for knot, following in pairwise(self.knots[max(self._knot_before(tokens), 0) :]):
            if knot.value == following.value:
                continue
            if knot.interpolation == "constant":
                return following.tokens
            return max(knot.tokens, tokens) + 1
        return None

    def _knot_before(self, tokens: int) -> int:
        return bisect.bisect_right(self.knots, tokens, key=lambda knot: knot.tokens) - 1

    def stretched(self, factor: float) -> "Schedule":
        """Return the schedule that has the same values at `factor` times the tokens."""
        return Schedule(tuple(replace(k, tokens=round(factor * k.tokens)) for k in self.knots))

    @property
    def smallest(self) -> float:
        """The smallest value; every interpolation is monotone between two knots."""
        return min(knot.value for knot in self.knots)

    @property
    def largest(self) -> float:
        """The largest value."""
        return max(knot.value for knot in self.knots)

    @classmethod
    def constant(cls, value: float) -> "Schedule":
        """Return the schedule that always has `value`."""
        return cls((Knot(0, float(value)),))

    @classmethod
    def steps(cls, knots: Iterable[tuple[int, float]]) -> "Schedule":
        """Return the staircase that jumps to each value at its token count."""
        return cls(tuple(Knot(int(tokens), float(value)) for tokens, value in knots))

    @classmethod
    def warmup_constant(cls, peak: float, *, warmup_tokens: int, start: float = 0.0) -> "Schedule":
        """Return a linear rise from `start` to `peak` over `warmup_tokens`, constant after."""
        rise = (Knot(0, float(start), "linear"),) if warmup_tokens else ()
        return cls((*rise, Knot(warmup_tokens, float(peak))))

    @classmethod
    def warmup_cosine(
        cls,
        peak: float,
        *,
        warmup_tokens: int,
        total_tokens: int,
        final: float = 0.0,
        start: float = 0.0,
    ) -> "Schedule":
        """Return a linear rise to `peak`, then a half cosine down to `final` at `total_tokens`."""
        rise = cls.warmup_constant(peak, warmup_tokens=warmup_tokens, start=start).knots[:-1]
        decay = Knot(warmup_tokens, float(peak), "cosine"), Knot(total_tokens, float(final))
        return cls((*rise, *decay))

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Read `VALUE`, or `TOKENS:VALUE` knots with an interpolation between each two.

        For example `3e-4` or `0:4M constant 3B:8M`; numbers may end with K, M, B or T.
        """
        words = text.split()
        if len(words) == 1 and ":" not in words[0]:
            return cls.constant(_parse_number(words[0], text))
        knots: list[Knot] = []
        for point, word in zip_longest(words[::2], words[1::2], fillvalue="constant"):
            tokens_text, colon, value_text = point.partition(":")
            if not colon:
                problem = f"schedule {text!r} has {point!r} where TOKENS:VALUE belongs"
                raise UserError(f"{problem}; write it like 0:0 linear 2M:3e-4")
            tokens = _parse_number(tokens_text, text)
            if tokens != int(tokens):
                raise UserError(f"schedule {text!r} has tokens={tokens_text}; use a whole number")
            interpolation: Any = word  # which `Schedule` checks
            knots.append(Knot(int(tokens), float(_parse_number(value_text, text)), interpolation))
        if not words or len(words) % 2 == 0:
            problem = f"schedule {text!r} does not end with a knot"
            raise UserError(f"{problem}; write it like 0:0 linear 2M:3e-4")
        return cls(tuple(knots))

    def __str__(self) -> str:
        if len(self.knots) == 1 and self.knots[0].tokens == 0:
            return _format_value(self.knots[0].value)
        words: list[str] = []
        for knot in self.knots:
            point = f"{_format_tokens(knot.tokens)}:{_format_value(knot.value)}"
            words += [point, knot.interpolation]
        return " ".join(words[:-1])

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, for `config.json`."""
        return {"knots": [asdict(knot) for knot in self.knots]}


@numbers.register
def _(schedule: Schedule) -> Iterable[float]:
    return [knot.value for knot in schedule.knots]


def parse_tokens(word: str, flag: str) -> int:
    """Return the whole token count that a flag has as text, such as `200000`, `4M` or `1.4T`."""
    try:
        tokens = _parse_number(word, word)
    except UserError:
        tokens = 0.5
    if tokens != int(tokens):
        raise UserError(f"{flag}={word} is not a whole number of tokens; write it like 4M")
    return int(tokens)


def register_tyro_rule(registry: "tyro.constructors.ConstructorRegistry") -> None:
    """Let fields of type `Schedule` be set on the command line by their text form."""
    import tyro

    @registry.primitive_rule
    def schedule_rule(
        type_info: tyro.constructors.PrimitiveTypeInfo,
    ) -> tyro.constructors.PrimitiveConstructorSpec[Schedule] | None:
        if type_info.type is not Schedule:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="'VALUE | TOKENS:VALUE [constant|linear|cosine TOKENS:VALUE ...]'",
            instance_from_str=lambda words: Schedule.parse(words[0]),
            is_instance=lambda instance: isinstance(instance, Schedule),
            str_from_instance=lambda instance: [str(instance)],
        )


def _parse_number(word: str, text: str) -> int | float:
    match = _NUMBER.fullmatch(word)
    if match is None or not math.isfinite(float(match[1])):
        raise UserError(f"schedule {text!r} has {word!r} where a number belongs, such as 2e6 or 4M")
    digits, suffix = match.groups()
    scale = _SUFFIXES.get(suffix, 1)
    if digits.lstrip("+-").isdigit():
        return int(digits) * scale
    value = float(digits) * scale
    # 1.4T is exact, although 1.4 × 10¹² need not be a whole number in binary.
    exact = scale > 1 and math.isclose(value, round(value), rel_tol=1e-15)
    return round(value) if exact else value


def _format_tokens(tokens: int) -> str:
    for suffix, scale in reversed(_SUFFIXES.items()):
        if tokens >= scale and tokens % scale == 0:
            return f"{tokens // scale}{suffix}"
    return str(tokens)


def _format_value(value: float) -> str:
    if value == int(value) and abs(value) < 2**53:
        return _format_tokens(int(value))
    return repr(value)
