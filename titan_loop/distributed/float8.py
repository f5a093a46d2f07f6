"""Matrix products of the layers in float8, by torchtitan's converter and torchao.

Embedding, head, exit gate, norms, routers and experts keep their precision; weights, moments and
checkpoints do, too. Without a GPU it is emulated: operands are rounded to float8 and multiplied in
the precision of training. Never run on a GPU here.
"""

from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from typing import Literal

import titan_loop.compat as compat  # before any torchtitan module
import torch
from torchtitan.models.common.linear import Linear
from torchtitan.tools.utils import has_cuda_capability, has_rocm_capability

from titan_loop.errors import UserError
from titan_loop.models.decoder import LoopDecoder

Float8 = Literal["off", "rowwise", "rowwise_with_gw_hp", "tensorwise"]
"""torchao's recipes: a scale for each row or tensor; gw_hp leaves gradients of weights in bf16."""

_MULTIPLE = 16  # of both sides of a product, as the tensor cores need


def float8_linears(model: LoopDecoder.Config) -> dict[str, Linear.Config]:
    """Return the linear layers that `in_float8` converts, by name."""
    return {
        name: linear
        for name, linear, *_ in model.traverse(Linear.Config)
        if name.startswith("layers.") and type(linear) is Linear.Config
    }


def in_float8(model: LoopDecoder.Config, recipe: Float8) -> LoopDecoder.Config:
    """Return a copy of an architecture whose layers multiply in float8."""
    from torchao.float8 import Float8LinearConfig  # takes seconds
    from torchtitan.components.quantization import Float8LinearConverter

    model = deepcopy(model)
    chosen = float8_linears(model)
    left_out = [name for name, *_ in model.traverse(Linear.Config) if name not in chosen]
    converter = Float8LinearConverter.Config(filter_fqns=left_out, emulate=True).build()
    # With emulate=True torchtitan asks for no GPU, and forgets the recipe.
    scaling = Float8LinearConfig.from_recipe_name(recipe)
    converter.torchao_config = replace(scaling, emulate=compat.device_type() == "cpu")
    return converter.convert(model)


def check_float8(
    recipe: Float8, model: LoopDecoder.Config, *, tokens: int, tensor_parallel: int, compiled: bool
) -> None:
    """Refuse shapes and layouts that cannot run in float8; `tokens` are one rank's in a pass."""
    if recipe == "off":
        return
    if tensor_parallel > 1:
        degree = f"parallelism.tensor_parallel_degree={tensor_parallel}"
        raise UserError(f"float8={recipe} does not support {degree}; leave it at 1")
    for name, linear in float8_linears(model).items():
        for width in (linear.in_features, linear.out_features):
            if width % _MULTIPLE:
                problem = f"needs widths divisible by {_MULTIPLE}, and {name} has {width}"
                raise UserError(f"float8={recipe} {problem}; change model.size, or leave it off")
    if tokens % _MULTIPLE:
        problem = f"needs a multiple of {_MULTIPLE} tokens in a pass, not {tokens}"
        raise UserError(f"float8={recipe} {problem}; change training.seq_len")
    if compiled and compat.device_type() == "cpu":
        problem = "is emulated without a GPU, which cannot be compiled"
        raise UserError(f"float8={recipe} {problem}; set --compile.no-enable")


def missing_for_float8() -> str:
    """Return the part that this machine lacks for float8, and a fix; empty if it has all."""
    if find_spec("torchao") is None:
        return "needs torchao; pip install titan-loop[float8]"
    if torch.cuda.is_available() and not (has_cuda_capability(8, 9) or has_rocm_capability(9, 4)):
        return "needs an NVIDIA GPU of compute capability 8.9, or an MI300; leave it off"
    return ""
