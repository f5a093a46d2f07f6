"""Asks MLX; runs in an environment of its own, with mlx-lm and nothing of this project.

    python mlx_lm_driver.py < requests.json > answers.json

Input: {"model": FOLDER, "prompt": ids, "count": n}; output: n greedy tokens after the prompt,
computed through MLX's cache, and the log-probabilities of all tokens before each. With "saved":
FILE, the cache of half of the prompt comes from a file, behind which two tokens were trimmed.
"""

import contextlib
import json
import sys
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)


def answer(model: str, prompt: list[int], count: int, saved: str = "") -> dict[str, Any]:
    """Return tokens and log-probabilities."""
    loaded, _ = load(model, tokenizer_config={"trust_remote_code": True})[:2]
    held = None
    if saved:
        held = make_prompt_cache(loaded)
        half = len(prompt) // 2
        loaded(mx.array([[*prompt[:half], 0, 0]]), cache=held)
        assert trim_prompt_cache(held, 2) == 2
        save_prompt_cache(saved, held)
        held, prompt = load_prompt_cache(saved), prompt[half:]
    found = [*generate_step(mx.array(prompt), loaded, max_tokens=count, prompt_cache=held)]
    return {
        "tokens": [int(token) for token, _ in found],
        "log_probs": [log_probs.tolist() for _, log_probs in found],
    }


if __name__ == "__main__":
    request = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        found = answer(**request)
    json.dump(found, sys.stdout)
