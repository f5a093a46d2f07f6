"""Dense models in MLX: what mlx-lm computes otherwise, mostly without a word.

Source: the model files of mlx-lm 0.32.2, each case tried on Linux.
"""

import math
from collections.abc import Mapping
from typing import Any

from titan_loop.formats.fields import SLIDING

_NO_WINDOW = ("mistral", "qwen2", "qwen3", "phi3", "gemma2")
_HEADS_OF_WIDTH = ("qwen2", "granite", "phi3")


def otherwise(config: Mapping[str, Any]) -> str | None:
    """Return what MLX does otherwise with a `config.json`, as a sentence; None for nothing."""
    kind, window = config["model_type"], config.get("sliding_window")
    has_window = (
        window is not None
        and window < config["max_position_embeddings"]
        and config.get("use_sliding_window", True)
    )
    if has_window and kind in _NO_WINDOW:
        return f"MLX has no windows for {kind}: its answers are right up to {window} tokens."
    slides = SLIDING in config.get("layer_types", ())
    if slides and kind == "gemma3_text" and not config.get("sliding_window_pattern"):
        return "MLX knows windows of Gemma 3 in a period alone, and gives them to other layers."
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "yarn":
        usual = 0.1 * math.log(scaling["factor"]) + 1
        if not scaling["truncate"] or not math.isclose(scaling["attention_factor"], usual):
            return f"MLX reads YaRN's attention_factor as {usual:.4g} and truncate as true."
    if kind in _HEADS_OF_WIDTH and (
        config.get("head_dim", 0) * config["num_attention_heads"] > config["hidden_size"]
    ):
        return f"MLX does not load {kind} with heads whose widths exceed the model's."
    if kind == "gemma2" and not config["tie_word_embeddings"]:
        return "MLX does not load a Gemma 2 whose head is not its embedding."
    return None
