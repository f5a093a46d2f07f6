"""Bounds and choices of settings, written on their fields and checked in one place.

    decay: Annotated[float, Ge(0), Lt(1), Hint("0.999 is usual")] = 0.0
    scale: Literal["original", "match_rms_adamw"] = "original"

The refusal reads FIELD=VALUE must be at least 0 and below 1; 0.999 is usual. Bounds apply to every
number of a list, and to every value of a schedule. Only relations between settings need code.
"""

import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, singledispatch
from itertools import chain
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from titan_loop.errors import Refusal, nearest

FINITE = Lt(math.inf)
_OPERATORS: dict[type, tuple[Any, str]] = {
    Ge: (operator.ge, "at least"),
    Gt: (operator.gt, "above"),
    Le: (operator.le, "at most"),
    Lt: (operator.lt, "below"),
}


@dataclass(frozen=True)
class Hint:
    """Advice that ends the refusal of a field's value."""

    text: str


class _Admitted(NamedTuple):
    choices: tuple[Any, ...] = ()
    bounds: tuple[Any, ...] = ()
    advice: tuple[str, ...] = ()


def bound_refusals(section: str, config: Any) -> Iterator[Refusal]:
    """Refuse values of a config, and of our configs inside it, that their fields do not admit."""
    admitted = _admitted_fields(type(config))
    for field in fields(config):
        value, name = getattr(config, field.name), field.name
        dotted = f"{section}.{name}" if section else name
        yield from _refused(dotted, value, admitted[name])
        if is_dataclass(value) and not type(value).__module__.startswith("torchtitan."):
            yield from bound_refusals(dotted, value)


def refused(name: str, value: Any, hint: Any) -> Iterator[Refusal]:
    """Yield the refusal of a value outside of its type hint; None is a matter of the type alone."""
    return _refused(name, value, _admitted(hint))


def _refused(name: str, value: Any, admitted: _Admitted) -> Iterator[Refusal]:
    choices, bounds, advice = admitted
    if value is None:
        return
    if choices and value not in choices:
        words = f"must be {' or '.join(map(str, choices))}{_close(value, choices)}"
        yield Refusal.of(name, value, words, "; ".join(advice))
    pairs = [(bound, _OPERATORS[type(bound)]) for bound in bounds]
    limits = [(getattr(bound, bound.__match_args__[0]), *test) for bound, test in pairs]
    if not all(test(number, limit) for number in numbers(value) for limit, test, _ in limits):
        words = ["finite" if math.isinf(limit) else f"{word} {limit}" for limit, _, word in limits]
        yield Refusal.of(name, value, f"must be {' and '.join(words)}", "; ".join(advice))


def _close(value: Any, choices: tuple[Any, ...]) -> str:
    return nearest(value, choices) if isinstance(value, str) and len(choices) > 3 else ""


@singledispatch
def numbers(value: Any) -> Iterable[float]:
    """Return the numbers to which the bounds of a field apply."""
    return value if isinstance(value, list | tuple) else (value,)


@cache
def _admitted_fields(kind: type) -> dict[str, _Admitted]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: _admitted(hint) for name, hint in hints.items()}


def _admitted(hint: Any) -> _Admitted:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _Admitted(inner)
    if origin is Annotated:
        notes = inner[1:]
        bounds = tuple(note for note in notes if type(note) in _OPERATORS)
        advice = tuple(note.text for note in notes if isinstance(note, Hint))
        return _joined([_admitted(inner[0]), _Admitted((), bounds, advice)])
    if origin in (Union, UnionType, list, tuple):
        return _joined([_admitted(kind) for kind in inner])
    return _Admitted()


def _joined(parts: list[_Admitted]) -> _Admitted:
    return _Admitted(*(tuple(chain(*found)) for found in zip(*parts, strict=True)))
