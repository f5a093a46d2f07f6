"""Dense models in MLX: what mlx-lm computes otherwise, mostly without a word.

Source: the model files of mlx-lm 0.32.2, tried on Linux.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from titan_loop.formats.fields import FULL, SLIDING

_NO_WINDOW = ("mistral", "qwen2", "qwen3", "phi3", "gemma2")
_NO_BIASES = ("qwen3", "gemma2", "gemma3_text")
_FULL_SOMEWHERE = ("smollm3", "olmo3")
_HEADS_OF_WIDTH = ("qwen2", "granite", "phi3")


def otherwise(config: Mapping[str, Any]) -> str | None:
    """Return what MLX does otherwise with a `config.json`, as sentences; None for nothing."""
    return " ".join(_differences(config)) or None


def _differences(config: Mapping[str, Any]) -> Iterator[str]:
    kind, window = config["model_type"], config.get("sliding_window")
    has_window = (
        window is not None
        and window < config["max_position_embeddings"]
        and config.get("use_sliding_window", True)
    )
    if has_window and kind in _NO_WINDOW:
        yield f"MLX has no windows for {kind}: its answers are right up to {window} tokens."
    kinds = config.get("layer_types", ())
    if kind in _FULL_SOMEWHERE and FULL not in kinds:
        yield f"MLX does not load {kind} with a window in every layer."
    if SLIDING in kinds and kind == "gemma3_text" and not config.get("sliding_window_pattern"):
        yield "MLX knows windows of Gemma 3 in a period alone, and gives them to other layers."
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "yarn":
        usual = 0.1 * math.log(scaling["factor"]) + 1
        if not scaling["truncate"] or not math.isclose(scaling["attention_factor"], usual):
            yield f"MLX reads YaRN's attention_factor as {usual:.4g} and truncate as true."
    width = config["head_dim"] * config["num_attention_heads"]
    if kind in _HEADS_OF_WIDTH and width != config["hidden_size"]:
        yield f"MLX does not load {kind} with heads that are not together as wide as the model."
    if kind == "gemma2" and not config["tie_word_embeddings"]:
        yield "MLX does not load a Gemma 2 whose head is not its embedding."
    if kind == "gemma2" and scaling:
        yield "MLX does not scale the rotations of a Gemma 2."
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    if kind == "gemma2" and not all(map(config.get, caps)):
        yield "MLX cannot run a Gemma 2 without both caps."
    if kind == "gemma3_text" and any(map(config.get, caps)):
        yield "MLX does not cap logits of a Gemma 3."
    if kind in _NO_BIASES and config["attention_bias"]:
        yield f"MLX does not load {kind} with attention's biases."
