"""Error of the state after every layer visit in bf16 and float8, against fp32.

    python tools/bench/low_precision.py runs/my_run --recurrent-steps 8
    python tools/bench/low_precision.py                    # initial weights, random tokens

The error is |low - fp32| / |fp32| of a token's state, as the root of its mean square over all
tokens. Products of the layers run in each precision, everything else in fp32; float8 needs torchao
and is emulated without a GPU. A precision whose error passes --most at a visit, or grows faster
than the number of steps, is named, and the program ends with 1.
"""

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from conditions import begin, parser_of
from torch import Tensor
from torch.nn import functional as F
from torchtitan.models.common.linear import Linear

from titan_loop.analysis.drawing import Axes, draw_panels
from titan_loop.analysis.steps.layer_states import at_layer_visits
from titan_loop.evaluation.window_scores import open_run
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.inference.loading import load_checkpoint
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder

RECIPES = ("rowwise", "tensorwise")


def main() -> int:
    """Print a table per precision, write the plot, and name the precisions whose error grows."""
    parser = parser_of(__doc__)
    parser.add_argument("run", nargs="?", type=Path, help="trained run; default a new model")
    parser.add_argument("--size", default="quickstart", help="of a new model")
    parser.add_argument("--recurrent-steps", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--most", type=float, default=0.2, help="largest error of a visit")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    options = begin(parser)
    if options.run is None:
        size = OuroOptions(size=options.size)
        torch.manual_seed(0)
        model = build_decoder(size, max_seq_len=options.seq_len)
        vocabulary = model.tok_embeddings.num_embeddings
        tokens_BL = torch.randint(vocabulary, (options.windows, options.seq_len))
    else:
        loaded = load_checkpoint(options.run)
        model, (source, *_) = loaded.model, open_run(loaded.run, count=options.windows).values()
        tokens_BL = torch.stack(list(source.input))[:, : options.seq_len]
    steps = options.recurrent_steps
    expected = states(model, tokens_BL, steps)
    errors, failed = {}, []
    for name, convert in precisions().items():
        low = convert(deepcopy(model))
        errors[name] = found = error_of(states(low, tokens_BL, steps), expected)
        growth = float(found[-1, -1] / found[0, -1])
        print(f"\n{name}, % by step and layer; the last step has {growth:.2f} times the first's")
        layers = " | ".join(f"layer {layer}" for layer in range(1, found.shape[1] + 1))
        print(f"| r | {layers} |\n|{'---|' * (found.shape[1] + 1)}")
        for step, row in enumerate(found, start=1):
            print(f"| {step} | {' | '.join(f'{100 * error:.2f}' for error in row)} |")
        if found.max() > options.most or growth > steps:
            failed.append(f"{name} ({100 * found.max():.1f} %, {growth:.1f} times)")
    limits = f"{100 * options.most:g} %, or {steps} times the first step's"
    said = f"{', '.join(failed) or 'No precision'} has an error above {limits}"
    print(f"\n{said}")
    if options.plot:
        print(draw_panels(list(errors), partial(_draw, errors), options.plot, title=said))
    return int(bool(failed))


def precisions() -> dict[str, Callable[[LoopDecoder], LoopDecoder]]:
    """Return functions that let a model's layers multiply in less precision, by its name."""
    found: dict[str, Callable[[LoopDecoder], LoopDecoder]] = {"bf16": _in_bf16}
    if find_spec("torchao"):
        found |= {recipe: partial(_in_float8, recipe) for recipe in RECIPES}
    else:
        print("without float8: torchao is not installed")
    return found


@torch.no_grad()
def states(model: LoopDecoder, tokens_BL: Tensor, steps: int) -> Tensor:
    """Return the fp32 states after every layer of every step, (R, layers, B, L, D)."""
    seen: list[Tensor] = []
    with at_layer_visits(model, lambda step, layer, state: seen.append(state.float())):
        model(tokens_BL, recurrent_steps=steps, collect="last")
    return torch.stack(seen).unflatten(0, (steps, -1))


def error_of(low: Tensor, expected: Tensor) -> np.ndarray:
    """Return the relative errors of states (R, layers, B, L, D) over tokens, (R, layers)."""
    relative = (low - expected).norm(dim=-1) / expected.norm(dim=-1)
    return relative.square().mean(dim=(-1, -2)).sqrt().numpy()


class _BF16Linear(Linear):
    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.bfloat16()
        return F.linear(input.bfloat16(), self.weight.bfloat16(), bias).to(input.dtype)


def _in_bf16(model: LoopDecoder) -> LoopDecoder:
    for part in model.layers.modules():
        if type(part) is Linear:  # not a router
            part.__class__ = _BF16Linear
    return model


def _in_float8(recipe: str, model: LoopDecoder) -> LoopDecoder:
    from torchao.float8 import (  # pyright: ignore[reportMissingImports]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    config = replace(
        Float8LinearConfig.from_recipe_name(recipe), emulate=not torch.cuda.is_available()
    )
    convert_to_float8_training(
        model.layers, config=config, module_filter_fn=lambda part, _: type(part) is Linear
    )
    return model


def _draw(errors: dict[str, np.ndarray], axes: Axes, name: str) -> None:
    for layer, values in enumerate(errors[name].T, start=1):
        axes.plot(range(1, len(values) + 1), 100 * values, label=f"layer {layer}")
    axes.set_xlabel("recurrent step r")
    axes.set_ylabel("% error of the state")
    axes.set_ylim(bottom=0)


if __name__ == "__main__":
    sys.exit(main())
