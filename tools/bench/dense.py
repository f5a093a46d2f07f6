"""A looped training step with each dense model's blocks beside Llama's, at equal head width.

    python tools/bench/dense.py --dim 256 --pairs 7

A step is forward, mean of the last state and backward, R = 4, one window, in turn.
"""

import argparse
import statistics
from collections.abc import Mapping
from typing import Any

import timing  # isort: skip  (imports titan_loop before any torchtitan module)
import torch

from titan_loop.models.dense import DenseOptions
from titan_loop.models.family import build_decoder

GEMMA: Mapping[str, Any] = {"norm_order": "both", "norm_offset": True, "activation": "gelu"}
BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": "head"},
    "olmo2": {"qk_norm": "all", "norm_order": "after"},
    "gemma3": {**GEMMA, "qk_norm": "head", "window": 256, "windowed_layers": (0, 1, 2)},
    "gemma2": {**GEMMA, "attention_softcap": 50.0, "window": 256, "windowed_layers": (0, 2)},
}


def main() -> None:
    """Print the ratio of each block's step to Llama's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=7)
    asked = parser.parse_args()
    tokens = torch.randint(1024, (1, asked.tokens))
    heads = {"n_heads": asked.dim // 64, "n_kv_heads": asked.dim // 64, "n_layers": 4}
    shape = {"dim": asked.dim, "hidden_dim": 3 * asked.dim, "vocab_size": 1024, **heads}
    models = {
        name: build_decoder(DenseOptions(**shape, **block), max_seq_len=asked.tokens)
        for name, block in BLOCKS.items()
    }
    steps = [
        lambda model=model: model(tokens, recurrent_steps=4).hidden_RBLD[-1].mean().backward()
        for model in models.values()
    ]
    seconds = timing.in_turn(steps, pairs=asked.pairs, warmup=2)
    print(f"D {asked.dim}, {asked.tokens} tokens, R = 4, {torch.get_num_threads()} threads")
    for name, own in zip(models, seconds, strict=True):
        ratio = statistics.median(map(lambda a, b: a / b, own, seconds[0]))
        print(f"{name:<8} {timing.spread(own)} s, {ratio:.3f} times llama's")


if __name__ == "__main__":
    main()
