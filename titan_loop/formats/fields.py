"""Fields of a `config.json`: read under defaults, and noted; fields of rotations.

Rotations stand at the top level (`rope_theta`, `rope_scaling`, transformers 4) or in
`rope_parameters` (5), there perhaps one object for each kind of layers.
"""

import math
import sys
from collections.abc import Collection, Container, Mapping
from typing import Any, NamedTuple, TypeAlias

from titan_loop.errors import UserError

Options: TypeAlias = dict[str, Any]
"""Options of `titan_loop.models.dense.BlockOptions`, by name."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers in `layer_types`."""

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_MORE = {"yarn": ("beta_slow", "beta_fast", "attention_factor", "truncate")}


# Larger numbers would fill the memory before the tensors contradict them.
_MOST_ROWS = 1 << 31


def integer(
    config: Mapping[str, Any],
    name: str,
    default: int | None = None,
    *,
    most: int = _MOST_ROWS,
    least: int = 1,
) -> int:
    """Return a field of `config.json` that is an integer in `least`…`most`."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < least:
        kind = "a positive integer" if least else "a whole number"
        raise UserError(f"config.json: {name}={value!r:.40} must be {kind}")
    if value > most:
        raise UserError(f"config.json: {name}={value!r:.40} must be at most {most}")
    return value


def boolean(config: Mapping[str, Any], name: str, default: bool | None = None) -> bool:
    """Return a field of `config.json` that is true or false."""
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise UserError(f"config.json: {name}={value!r:.40} must be true or false")
    return value


def positive(name: str, value: Any) -> float:
    """Return a field of `config.json`; raise `UserError` unless it is a positive number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:
        raise UserError(f"config.json: {name}={value!r:.40} must be a positive number")
    return float(value)


def unsupported(name: str, found: Any, wanted: Any) -> UserError:
    """Return the error for an unsupported value of a field in `config.json`."""
    return UserError(
        f"config.json: {name}={found!r:.80} is not supported by titan_loop; only {wanted!r:.80} "
        "can be imported"
    )


class Field(NamedTuple):
    """A field of `config.json` that holds an option.

    Attributes:
        kind: Type of its value: a whole number, a positive number, or true or false.
        default: Value where it is absent; None where it must be there.
        least: Smallest whole number.
    """

    name: str
    kind: type = int
    default: Any = None
    least: int = 1

    def read(self, config: Mapping[str, Any]) -> Any:
        """Return the value, of the right kind."""
        if self.kind is int:
            return integer(config, self.name, self.default, least=self.least)
        if self.kind is bool:
            return boolean(config, self.name, self.default)
        return positive(self.name, config.get(self.name, self.default))


class Fields:
    """A `config.json` under its class' defaults, which notes the fields that were read."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.config, self._defaults = config, defaults
        self._read: set[str] = set()

    def __call__(self, name: str, default: Any = None) -> Any:
        """Return a field; where it is absent, the class' default, else `default`."""
        self._read.add(name)
        return self.config.get(name, self._defaults.get(name, default))

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a positive integer; null is as good as absent."""
        value = self(name, default)
        return integer({name: value}, name, default)

    def flag(self, name: str) -> bool:
        """Return a boolean, False by default; null is False."""
        return boolean({name: self(name) or False}, name)

    def require(self, **wanted: Any) -> None:
        """Refuse a field with another value than the wanted one, or falsy for a falsy one."""
        for name, value in wanted.items():
            found = self(name, value)
            if found != value and (found or value):
                raise unsupported(name, found, value)

    def finish(self, no_effect: Container[str]) -> None:
        """Refuse every field that nobody read, unless it has no effect."""
        for name, value in self.config.items():
            harmless = name in self._read or name in no_effect or value in (None, False, [], {})
            if not harmless:
                raise UserError(
                    f"config.json: {name}={value!r:.80} is unknown to titan_loop, and may change "
                    "the computation; remove it if it does not"
                )


def read_rotations(fields: Fields, width: int, kinds: Collection[str] = _NEEDED) -> Options:
    """Return the options of the rotations of heads of a width, of layers that see all keys.

    `kinds` are the kinds of scaling that the format has.
    """
    rope: Options = {}
    section = "rope_scaling"
    for name in (section, "rope_parameters"):
        part = fields(name)
        if part is not None and not isinstance(part, dict):
            raise UserError(f"config.json: {name}={part!r:.80} must be an object or null")
        rope |= (part or {}).get(FULL, part or {})
        section = name if part else section
    rope = {name: value for name, value in rope.items() if value is not None}
    kind = rope.pop("type", "default")
    kind = rope.pop("rope_type", kind)
    if kind not in kinds:
        raise unsupported("rope_type", kind, " or ".join(kinds))
    share = positive("partial_rotary_factor", fields("partial_rotary_factor") or 1.0)
    share = positive("partial_rotary_factor", rope.pop("partial_rotary_factor", share))
    if share > 1:
        raise unsupported("partial_rotary_factor", share, "1 or less")
    options: Options = {"rope_theta": _theta(fields, rope.pop("rope_theta", None))}
    if (turned := int(width * share)) != width:
        options["rotary_dim"] = turned
    if kind == "default":  # which reads nothing else
        return options
    for name in rope:
        if name not in (*_NEEDED[kind], *_MORE.get(kind, ())):
            raise unsupported(f"{section}.{name}", rope[name], None)
    numbers = {name: positive(f"{section}.{name}", rope.get(name)) for name in _NEEDED[kind]}
    options |= {"rope_scaling": kind, "rope_factor": numbers["factor"]}
    if kind == "linear":
        return options
    options["rope_original"] = int(numbers["original_max_position_embeddings"])
    if kind == "llama3":
        low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
        return options | {"rope_low": low, "rope_high": high}
    factor = rope.get("attention_factor")
    if factor is None:  # the paper's
        factor = 0.1 * math.log(numbers["factor"]) + 1 if numbers["factor"] > 1 else 1.0
    return options | {
        "rope_low": positive("beta_slow", rope.get("beta_slow", 1)),
        "rope_high": positive("beta_fast", rope.get("beta_fast", 32)),
        "rope_attention_factor": positive("attention_factor", factor),
        "rope_truncate": bool(rope.get("truncate", True)),
    }


def _theta(fields: Fields, nested: Any) -> float:
    top = fields.config.get("rope_theta")
    if nested is not None and top is not None and nested != top:
        raise UserError(f"config.json: rope_theta has several values, {[top, nested]}; keep one")
    theta = fields("rope_theta") if nested is None else nested
    if theta is None:
        raise UserError("config.json: rope_theta is missing; add the base of the training")
    return positive("rope_theta", theta)


def windowed_theta(fields: Fields, theta: float | None) -> float:
    """Return the base of layers with a window; `theta` where `rope_parameters` has none."""
    nested = (fields("rope_parameters") or {}).get(SLIDING) or {}
    if (kind := nested.get("rope_type", "default")) != "default":
        raise unsupported(f"rope_parameters.{SLIDING}.rope_type", kind, "default")
    return positive("rope_theta", nested.get("rope_theta", theta))


def rotation_fields(options: Options) -> Options:
    """Return the fields of rotations, as both versions of transformers read them."""
    kind = options["rope_scaling"]
    if kind == "none":
        return {"rope_theta": options["rope_theta"], "rope_scaling": None}
    scaling: Options = {"rope_type": kind, "factor": options["rope_factor"]}
    if kind != "linear":
        scaling["original_max_position_embeddings"] = options["rope_original"]
    if kind == "llama3":
        scaling |= {
            "low_freq_factor": options["rope_low"],
            "high_freq_factor": options["rope_high"],
        }
    if kind == "yarn":
        scaling |= {
            "beta_slow": options["rope_low"],
            "beta_fast": options["rope_high"],
            "attention_factor": options["rope_attention_factor"],
            "truncate": options["rope_truncate"],
        }
    return {"rope_theta": options["rope_theta"], "rope_scaling": scaling}
