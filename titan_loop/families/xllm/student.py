"""Distilled prefill: a student predicts a prompt's last state, so that one recurrence is enough.

    s = blocks(W e)                       e = the prelude's output, before any norm
    L = 1/N Σ_i [ |s_i − h_i|² / E + KL(head(coda(h_i)) || head(coda(s_i))) ]

| symbol | code |
|---|---|
| W, blocks | `Student`, `model.student` blocks of the model's own kind |
| h | state after R steps of the frozen model |
| E | mean square of h over a window; squares are means over the width, too |
| N | valid tokens of the global batch |

In a model with a student only the student trains. A prompt that runs fewer steps than generated
tokens do (`--prefill-steps`) starts from s instead of the start state.

Source: Huang et al. 2026 ("Towards Looped Models Done Right", Part II), Table 4, and their code.
Deviation: E there is one number, the mean over 64 windows; here every window has its own, which
needs no calibration.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module, ModuleList

from titan_loop.models.block import DenseBlock
from titan_loop.models.context import LoopContext
from titan_loop.models.initialisation import normal_matrix

ERROR, TAUGHT = "student_error", "taught"
"""Names in `LoopOutput.aux`: the scaled squared error (B, L), and the frozen model's state."""


class Student(Module):
    """Maps the prelude's output to the state after R steps, (B, L, D) each."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Input map and blocks."""

        input: Linear.Config
        layers: list[DenseBlock.Config]

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input = config.input.build()
        self.layers = ModuleList(layer.build() for layer in config.layers)

    def forward(self, prelude_BLD: Tensor, context: LoopContext) -> Tensor:
        """Return the predicted state; never reads or writes a cache in the context."""
        state_BLD = self.input(prelude_BLD)
        for layer in self.layers:
            state_BLD = layer(state_BLD, context._replace(cache=None))
        return state_BLD


def student_config(layers: list[DenseBlock.Config], dim: int, std: float) -> Student.Config:
    """Return a student of the given blocks.

    Args:
        std: Standard deviation of the input map's initial weights.
    """
    weight = {"weight": partial(normal_matrix, std=std)}
    return Student.Config(
        input=Linear.Config(in_features=dim, out_features=dim, param_init=weight), layers=layers
    )


def scaled_error(predicted_BLD: Tensor, state_BLD: Tensor) -> Tensor:
    """Return |s − h|² / E of every token, (B, L), in fp32."""
    wide_BLD = state_BLD.float()
    energy_B1 = wide_BLD.square().mean(dim=(1, 2)).unsqueeze(1)
    return (predicted_BLD.float() - wide_BLD).square().mean(dim=-1) / energy_B1


@torch.no_grad()
def start_from_teacher(student: Student, layers: Sequence[nn.Module], injection: nn.Module) -> None:
    """Set the student's weights so that it computes one recurrence from a zero state.

    The model may be whole or sharded. Exact with one core pass, no untied steps, and neither
    `prelude_norm` nor `state_norm`.

    Args:
        layers: Layers of the core, as many as the student has blocks.
        injection: A diagonal or orthogonal injection; Δ and its matrix W_in give W = Δ ⊙ W_in.
    """
    for block, layer in zip(student.layers, layers, strict=True):
        for name, parameter in block.named_parameters():
            parameter.copy_(layer.get_parameter(name))
    step_D = _whole(injection.get_parameter("step_bias"))
    weight_DD = F.softplus(step_D).unsqueeze(1) * _whole(injection.get_parameter("weight"))
    own = student.input.weight
    if isinstance(own, DTensor):
        weight_DD = distribute_tensor(weight_DD, own.device_mesh, own.placements)
    own.copy_(weight_DD)


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
