"""Matrix products of the layers in float8, by torchtitan's converter and torchao.

Embedding, head, exit gate, norms, routers and experts keep their precision; weights, moments and
checkpoints do, too. Without a GPU it is emulated: operands are rounded to float8 and multiplied in
the precision of training. Not yet run on a GPU.
"""

from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal

import titan_loop.compat as compat  # before any torchtitan module
import torch
from torchtitan.models.common.linear import Linear
from torchtitan.tools.utils import has_cuda_capability, has_rocm_capability

from titan_loop.models.decoder import LoopDecoder

Float8 = Literal["off", "rowwise", "rowwise_with_gw_hp", "tensorwise"]
"""torchao's recipes: a scale per row or tensor; gw_hp computes gradients of weights in bf16."""


def float8_linears(model: LoopDecoder.Config) -> dict[str, Linear.Config]:
    """Return the linear layers that `in_float8` converts, by name."""
    return {
        name: linear
        for name, linear, *_ in model.traverse(Linear.Config)
        if name.startswith("layers.") and type(linear) is Linear.Config
    }


def in_float8(model: LoopDecoder.Config, recipe: Float8) -> LoopDecoder.Config:
    """Return a copy of an architecture whose layers multiply in float8."""
    # Only here: importing torchao slows every start.
    from torchao.float8 import Float8LinearConfig  # pyright: ignore[reportMissingImports]
    from torchtitan.components.quantization import Float8LinearConverter

    model = deepcopy(model)
    chosen = float8_linears(model)
    left_out = [name for name, *_ in model.traverse(Linear.Config) if name not in chosen]
    # With emulate=True torchtitan requires no GPU, but ignores the recipe, except its name.
    named: Any = {"recipe_name": recipe}  # it does not declare tensorwise
    converter = Float8LinearConverter.Config(filter_fqns=left_out, emulate=True, **named).build()
    scaling = Float8LinearConfig.from_recipe_name(recipe)
    converter.torchao_config = replace(scaling, emulate=compat.device_type() == "cpu")
    return converter.convert(model)


def missing_for_float8() -> str:
    """Return the reason why this machine cannot run float8, and a fix; empty if it can."""
    if find_spec("torchao") is None:
        return "needs torchao; pip install titan-loop[float8]"
    if torch.cuda.is_available() and not (has_cuda_capability(8, 9) or has_rocm_capability(9, 4)):
        return "needs an NVIDIA GPU of compute capability 8.9, or an MI300; leave it off"
    return ""
