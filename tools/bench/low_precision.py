"""Error of the state after every layer visit in bf16, float8 and MXFP8, against fp32.

    python tools/bench/low_precision.py runs/my_run --recurrent-steps 8
    python tools/bench/low_precision.py                    # initial weights, random tokens

The error is |low - fp32| / |fp32| of a token's state, as the root of its mean square over all
tokens. Products of the layers run in each precision, everything else in fp32. float8 and MXFP8 (a
scale for every 32 numbers) need torchao and are emulated on the CPU. A precision whose error passes
--threshold at a visit, or grows faster than the number of steps, gets a line, and the program ends
with 1.
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

from titan_loop.analysis.drawing import COLORS, GREY, Axes, draw_axes
from titan_loop.evaluation.window_scores import open_run
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.inference.hooks import AFTER_LAYERS, Hooks
from titan_loop.inference.loading import load_checkpoint
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder

RECIPES = ("rowwise", "tensorwise")
MX_BLOCK = 32
"""Numbers that share a scale in MXFP8."""


def main() -> int:
    """Print a table per precision, write the plot, and name the precisions whose error grows."""
    parser = parser_of(__doc__)
    parser.add_argument("run", nargs="?", type=Path, help="trained run; default a new model")
    parser.add_argument("--size", default="quickstart", help="of a new model")
    parser.add_argument("--recurrent-steps", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument(
        "--threshold", type=float, default=0.2, help="largest error of a visit, as a fraction"
    )
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
    errors: dict[str, np.ndarray] = {}
    for name, convert in precisions(model).items():
        low = convert(deepcopy(model))
        errors[name] = found = error_of(states(low, tokens_BL, steps), expected)
        growth = float(found[-1, -1] / found[0, -1])
        print(f"\n{name}, % by step and layer; the last step has {growth:.2f} times the first's")
        layers = " | ".join(f"layer {layer}" for layer in range(1, found.shape[1] + 1))
        print(f"| r | {layers} |\n|{'---|' * (found.shape[1] + 1)}")
        for step, row in enumerate(found, start=1):
            print(f"| {step} | {' | '.join(f'{100 * error:.2f}' for error in row)} |")
    faults = [line for name in errors for line in faults_of(name, errors[name], options.threshold)]
    said = faults or [f"No error is above {100 * options.threshold:g} %, or grows faster than r"]
    print("", *said, sep="\n")
    if options.plot:
        draw = partial(draw_errors, errors, options.threshold)
        print(draw_axes(draw, options.plot, title=". ".join(said)))
    return int(bool(faults))


def faults_of(name: str, errors: np.ndarray, threshold: float) -> list[str]:
    """Return a line if an error (R, layers) is above a threshold, and one if it outgrows R."""
    found: list[str] = []
    step, layer = np.unravel_index(errors.argmax(), errors.shape)
    if not (most := errors[step, layer]) <= threshold:  # not a number, too
        found.append(
            f"{name}: the error is {100 * most:.1f} % after step {step + 1}, layer {layer + 1}, "
            f"above {100 * threshold:g} %"
        )
    if (growth := errors[-1, -1] / errors[0, -1]) > len(errors):
        found.append(f"{name}: the error grows {growth:.1f} times in {len(errors)} steps")
    return found


def draw_errors(errors: dict[str, np.ndarray], threshold: float, axes: Axes) -> None:
    """Draw a line per precision through the errors (R, layers) of all visits."""
    for (name, values), color in zip(errors.items(), COLORS, strict=False):
        visits = np.arange(1, values.size + 1) / values.shape[1]
        axes.plot(visits, 100 * values.ravel(), color=color, label=name, marker=".")
    axes.axhline(100 * threshold, color=GREY, linewidth=0.8, label="threshold")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(1, max(map(len, errors.values())) + 1))
    axes.set_xlabel("end of recurrent step r (a point per layer)")
    axes.set_ylabel("% error of the state")


def precisions(model: LoopDecoder) -> dict[str, Callable[[LoopDecoder], LoopDecoder]]:
    """Return functions that let a model's layers multiply in less precision, by its name."""
    found = {"bf16": partial(_as_kind, _BF16Linear)}
    if not find_spec("torchao"):
        print("without float8 and mxfp8: torchao is not installed")
        return found
    found |= {recipe: partial(_in_float8, recipe) for recipe in RECIPES}
    uneven = [part.in_features for part in _linears(model) if part.in_features % MX_BLOCK]
    if uneven:
        print(f"without mxfp8: inputs of {uneven[0]} are no multiple of {MX_BLOCK}")
        return found
    return found | {"mxfp8": partial(_as_kind, _mxfp8_linear())}


@torch.no_grad()
def states(model: LoopDecoder, tokens_BL: Tensor, steps: int) -> Tensor:
    """Return the fp32 states after every layer of every step, (R, layers, B, L, D)."""
    seen: list[Tensor] = []
    with Hooks(model, [(AFTER_LAYERS, lambda state, hook: seen.append(state.float()))]):
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


def _mxfp8_linear() -> type[Linear]:
    from torchao.prototype.moe_training.mxfp8_linear import (  # pyright: ignore
        KernelPreference,
        ScaleCalculationMode,
        _to_mxfp8_then_scaled_mm,
    )

    class MXFP8Linear(Linear):
        def forward(self, input: Tensor) -> Tensor:
            how = KernelPreference.EMULATED, ScaleCalculationMode.RCEIL  # as torchtitan trains
            output = _to_mxfp8_then_scaled_mm(input, self.weight, *how)
            return output if self.bias is None else output + self.bias

    return MXFP8Linear


def _linears(model: LoopDecoder) -> list[Linear]:
    return [part for part in model.layers.modules() if type(part) is Linear]  # not a router


def _as_kind(kind: type[Linear], model: LoopDecoder) -> LoopDecoder:
    for part in _linears(model):
        part.__class__ = kind
    return model


def _in_float8(recipe: str, model: LoopDecoder) -> LoopDecoder:
    from torchao.float8 import (  # pyright: ignore[reportMissingImports]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(
        model.layers, config=config, module_filter_fn=lambda part, _: type(part) is Linear
    )
    return model


if __name__ == "__main__":
    sys.exit(main())
