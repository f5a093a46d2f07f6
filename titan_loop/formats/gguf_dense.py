"""Dense models in llama.cpp: architecture, keys and tensors of each `model_type`.

llama.cpp takes some options from the architecture or from the number of layers. A model that it
would compute otherwise is refused.

Source: the model files of llama.cpp, tried with b11549.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_loop.errors import UserError
from titan_loop.formats.fields import Options


class Engine(NamedTuple):
    """A model type in llama.cpp.

    Attributes:
        neighbours: Whether it rotates neighbouring elements of a head.
        windows: Whether layers have a window, in a period of `attention.sliding_window_pattern`.
        other_scale: Number of layers at which it takes the scale of another model of the kind.
        biases: Values of `attention_biases` that it has.
    """

    architecture: str
    neighbours: bool = False
    windows: bool = False
    other_scale: int = 0
    biases: tuple[str, ...] = ("none",)


ENGINES: Mapping[str, Engine] = {
    "llama": Engine("llama", neighbours=True, biases=("none", "qkv", "qkvo")),
    "mistral": Engine("llama", neighbours=True),
    "qwen2": Engine("qwen2", biases=("qkv",)),
    "qwen3": Engine("qwen3"),
    "olmo2": Engine("olmo2"),
    "olmo3": Engine("olmo2", windows=True),
    "gemma2": Engine("gemma2", windows=True, other_scale=46),
    "gemma3_text": Engine("gemma3", windows=True, other_scale=62),
    "smollm3": Engine("smollm3", neighbours=True),
    "granite": Engine("granite", neighbours=True),
    "phi3": Engine("phi3"),
}
"""By `model_type`."""

_FACTORS = ("llama", "granite")
"""Architectures with `rope_freqs`; a file of another one that has it is not loaded."""
_WHOLE_HEADS = ("qwen2", "olmo2", "phi3")
"""Architectures whose heads are together as wide as the model; others' files are not loaded."""
_NOPE_PERIOD = 4
"""Layers between two without rotations, which llama.cpp's SmolLM3 fixes."""


def keys(kind: str, options: Options) -> dict[str, Any]:
    """Return GGUF's keys beyond Llama's; `UserError` if llama.cpp computes the model otherwise."""
    engine = ENGINES[kind]
    width = options["head_dim"] or options["dim"] // options["n_heads"]
    found: dict[str, Any] = {}
    if width * options["n_heads"] != options["dim"]:
        if engine.architecture in _WHOLE_HEADS:
            raise _otherwise(kind, "head_dim", width)
        found |= {"attention.key_length": width, "attention.value_length": width}
    if options["attention_biases"] not in engine.biases or (
        options["feed_forward_biases"] and kind != "llama"
    ):
        raise _otherwise(kind, "attention_biases", options["attention_biases"])
    scaling = options["rope_scaling"]
    if scaling == "yarn" or (scaling == "llama3" and engine.architecture not in _FACTORS):
        raise _otherwise(kind, "rope_scaling", scaling)
    if scaling == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": options["rope_factor"]}
    found |= _window(kind, engine, options)
    if engine.other_scale:
        scaled = options["n_layers"] != engine.other_scale
        usual = (width if scaled else options["dim"] // options["n_heads"]) ** -0.5
        if not math.isclose(options["attention_scale"] or width**-0.5, usual, rel_tol=1e-6):
            layers = f", of {options['n_layers']} layers"
            raise _otherwise(kind, "attention_scale", f"{options['attention_scale']}{layers}")
    if kind == "gemma2":
        if not options["tie_weights"]:
            raise _otherwise(kind, "tie_weights", "False")
        for name, key in {
            "attention_softcap": "attn_logit_softcapping",
            "logit_softcap": "final_logit_softcapping",
        }.items():
            if not options[name]:
                raise _otherwise(kind, name, options[name])
            found[key] = options[name]
    elif options["attention_softcap"] or options["logit_softcap"]:
        raise _otherwise(kind, "logit_softcap", options["logit_softcap"])
    if kind == "granite":
        found |= {
            "embedding_scale": options["embedding_scale"],
            "residual_scale": options["residual_multiplier"],
            "attention.scale": options["attention_scale"],
            "logit_scale": 1 / options["logit_scale"],
        }
    if kind == "smollm3":
        layers = range(options["n_layers"])
        usual = tuple(layer for layer in layers if (layer + 1) % _NOPE_PERIOD == 0)
        if options["unrotated_layers"] != usual:
            raise _otherwise(kind, "unrotated_layers", options["unrotated_layers"])
    return found


def _window(kind: str, engine: Engine, options: Options) -> dict[str, Any]:
    window, windowed = options["window"], options["windowed_layers"]
    wide = window is None or window >= options["max_positions"]
    if wide and options["window_rope_theta"] is None:
        # Without the key, its Gemma 2 has windows of 4096.
        return {"attention.sliding_window": window} if kind == "gemma2" else {}
    layers = range(options["n_layers"])
    for period in (0, *layers):
        slide = [layer for layer in layers if not period or layer % period < period - 1]
        if engine.windows and tuple(slide) == windowed:
            theta = options["window_rope_theta"] or options["rope_theta"]
            return {
                "attention.sliding_window": window,
                "attention.sliding_window_pattern": period,
                "rope.freq_base_swa": float(theta),
            }
    raise _otherwise(kind, "windowed_layers", f"{windowed} with window {window}")


def _otherwise(kind: str, name: str, value: Any) -> UserError:
    return UserError(
        f"model.{name}={value}: llama.cpp computes {kind} otherwise; export to retrofit-unrolled, "
        "llama-unrolled or retrofit"
    )


def frequency_factors(options: Options) -> Tensor | None:
    """Return the divisors of rotations that llama3's scaling makes, (d/2,); None without it."""
    if options["rope_scaling"] != "llama3":
        return None
    width = options["rotary_dim"] or options["head_dim"] or options["dim"] // options["n_heads"]
    elements = torch.arange(0, width, 2, dtype=torch.float64) / width
    turns = options["rope_original"] / (2 * math.pi * options["rope_theta"] ** elements)
    share = (turns - options["rope_low"]) / (options["rope_high"] - options["rope_low"])
    share = share.clamp(0, 1)
    return (1 / (share + (1 - share) / options["rope_factor"])).float()
