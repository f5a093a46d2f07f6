"""Small blocks of dense models, as options: what each differs in from Llama's."""

from typing import Any

GEMMA = {
    "norm_order": "both",
    "norm_offset": True,
    "activation": "gelu",
    "embedding_scale": 8.0,  # the square root of 64, the width
    "attention_scale": 0.2,
    "window": 5,
    "windowed_layers": (0,),
}
BLOCKS: dict[str, dict[str, Any]] = {
    "llama3": {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original": 16},
    "mistral": {"window": 4, "head_dim": 32},
    "qwen2": {"attention_biases": "qkv"},
    "qwen3": {"qk_norm": "head", "head_dim": 32, "rope_scaling": "yarn", "rope_factor": 4.0,
              "rope_original": 16, "rope_attention_factor": 1.2},
    "olmo2": {"norm_order": "after", "qk_norm": "all"},
    "gemma2": {**GEMMA, "attention_softcap": 3.0, "logit_softcap": 2.0},
    "gemma3": {**GEMMA, "qk_norm": "head", "window_rope_theta": 100.0, "rope_scaling": "linear",
               "rope_factor": 4.0},
    "smollm3": {"unrotated_layers": (1,), "attention_biases": "qkvo", "feed_forward_biases": True},
    "granite": {"embedding_scale": 3.0, "residual_multiplier": 0.5, "attention_scale": 0.3,
                "logit_scale": 0.25},
    "phi3": {"rotary_dim": 8},
}  # fmt: skip
"""By model type."""
