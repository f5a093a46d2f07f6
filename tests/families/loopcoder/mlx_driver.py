"""Asks MLX; runs in an environment of its own, with mlx-lm and nothing of this project.

    python mlx_driver.py < request.json > answer.json

Input: {"model": FOLDER, "ids": rows of ids, "weight": (B, L, V), "prompt": ids, "count": n};
output: the logits of `ids`, the gradients of Σ weight · logits by name, and n greedy tokens
after the prompt, through MLX's cache.
"""

import contextlib
import json
import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.generate import generate_step


def answer(
    model: str, ids: list[list[int]], weight: list, prompt: list[int], count: int
) -> dict[str, Any]:
    """Return logits, gradients and tokens."""
    loaded = load(model, tokenizer_config={"trust_remote_code": True})[0]
    given, factors = mx.array(ids), mx.array(weight)
    gradients = nn.value_and_grad(loaded, lambda m: (m(given) * factors).sum())(loaded)[1]
    tokens = [int(token) for token, _ in generate_step(mx.array(prompt), loaded, max_tokens=count)]
    return {
        "logits": loaded(given).tolist(),
        "gradients": {name: each.tolist() for name, each in tree_flatten(gradients)},
        "tokens": tokens,
    }


if __name__ == "__main__":
    request = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        found = answer(**request)
    json.dump(found, sys.stdout)
