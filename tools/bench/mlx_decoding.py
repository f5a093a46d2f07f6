"""Cache and time of decoding a folder's model in MLX, after prompts of several lengths.

    MLX_PYTHON tools/bench/mlx_decoding.py NAME=FOLDER... [--lengths 256 1024] [--tokens 16]

Runs in the environment of `tools/test_engines.sh` that has mlx-lm and nothing of this project.
Prints the bytes of keys and values over the number of tokens, and the least CPU time of a token of
three rounds, in which the models take turns. MLX adds room for 256 tokens at a time, so lengths are
multiples of it. A model's weights may be random.
"""

import argparse
import time

import mlx.core as mx  # pyright: ignore[reportMissingImports]
from mlx.utils import tree_flatten  # pyright: ignore[reportMissingImports]
from mlx_lm import load  # pyright: ignore[reportMissingImports]
from mlx_lm.models.cache import make_prompt_cache  # pyright: ignore[reportMissingImports]

ROUNDS = 3


def size(cache: list) -> int:
    """Return the bytes of all keys and values that a cache holds."""
    parts = [part for each in cache for _, part in tree_flatten(each.state)]
    return sum(part.nbytes for part in parts if isinstance(part, mx.array))


def decode(model, length: int, tokens: int) -> tuple[int, float]:
    """Return the bytes held at `length` tokens, and the CPU milliseconds of the last ones."""
    cache = make_prompt_cache(model)
    prompt = mx.arange(length - tokens)[None] * 7 % model.args.vocab_size
    for start in range(0, length - tokens, 512):
        mx.eval(model(prompt[:, start : start + 512], cache=cache))
    started = time.process_time()
    for _ in range(tokens):
        mx.eval(model(mx.array([[1]]), cache=cache))
    spent = time.process_time() - started
    return size(cache), 1e3 * spent / tokens  # a window is cut to its size by the token after it


def main() -> None:
    """Print a row for each model and length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--tokens", type=int, default=16)
    asked = parser.parse_args()
    named = [each.split("=", 1) for each in asked.models]
    models = {
        name: load(folder, tokenizer_config={"trust_remote_code": True})[0]
        for name, folder in named
    }
    print("| model | tokens | bytes of cache a token | ms a token |")
    print("|---|---|---|---|")
    for length in asked.lengths:
        found: dict[str, list] = {name: [] for name in models}
        for _ in range(ROUNDS):
            for name, model in models.items():
                found[name].append(decode(model, length, asked.tokens))
        for name, rounds in found.items():
            held, least = rounds[0][0], min(spent for _, spent in rounds)
            print(f"| {name} | {length} | {held / length:,.0f} | {least:.1f} |", flush=True)


if __name__ == "__main__":
    main()
