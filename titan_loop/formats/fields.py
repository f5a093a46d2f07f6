"""Fields of a `config.json`: read under defaults, and noted; fields of rotations.

Rotations stand at the top level (`rope_theta`, `rope_scaling`, transformers 4) or in
`rope_parameters` (5), there perhaps one object for each kind of layers.
"""

import math
from collections.abc import Container, Mapping
from typing import Any, TypeAlias

from titan_loop.errors import UserError
from titan_loop.formats.llama_shape import integer, positive, unsupported

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
        value = self(name) or False
        if not isinstance(value, bool):
            raise UserError(f"config.json: {name}={value!r:.40} must be true or false")
        return value

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


def read_rotations(fields: Fields, width: int) -> Options:
    """Return the options of the rotations of heads of a width, of layers that see all keys."""
    rope: Options = {}
    for name in ("rope_scaling", "rope_parameters"):
        part = fields(name)
        if part is not None and not isinstance(part, dict):
            raise UserError(f"config.json: {name}={part!r:.80} must be an object or null")
        rope |= (part or {}).get(FULL, part or {})
    rope = {name: value for name, value in rope.items() if value is not None}
    kind = rope.pop("type", "default")
    kind = rope.pop("rope_type", kind)
    if kind not in _NEEDED:
        raise unsupported("rope_type", kind, " or ".join(_NEEDED))
    share = positive("partial_rotary_factor", fields("partial_rotary_factor") or 1.0)
    share = positive("partial_rotary_factor", rope.pop("partial_rotary_factor", share))
    options: Options = {"rope_theta": _theta(fields, rope.pop("rope_theta", None))}
    if (turned := int(width * share)) != width:
        options["rotary_dim"] = turned
    for name in rope:
        if name not in (*_NEEDED[kind], *_MORE.get(kind, ())):
            raise unsupported(f"rope_scaling.{name}", rope[name], None)
    if kind == "default":
        return options
    numbers = {name: positive(f"rope_scaling.{name}", rope.get(name)) for name in _NEEDED[kind]}
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
