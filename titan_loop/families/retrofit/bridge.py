"""The ways in which a step reads the prelude's output e again: a bridge, or a mixer.

    bridge   x_{r+1} = h_r + W RMSNorm(e)
    mixer    x_r = A [h_{r−1}; e],   h_0 = e, or noise of N(0, σ²)

The bridge's W starts at zero, so that a model with an untrained bridge is the bare loop, and with
one step it is the dense model whatever W is. The mixer's A (D × 2D) starts as [1, 0], or with noise
as [0, 1], so that the first pass reads the prelude as the layers after it did.

Sources: bridge: Shapiro 2026, arXiv 2608.11233, §3; mixer: McLeish et al. 2025, arXiv 2511.07384,
and Geiping et al. 2025, arXiv 2502.05171, §3.1. Deviations: the bridge has an RMSNorm, like the
rest of Llama, in place of LayerNorm; the mixer's state starts as the prelude's output unless asked
for noise; noise is drawn in training alone; everywhere else the state starts at 0, its mean.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common.decoder_sharding import norm_config
from torchtitan.protocols.module import Module

from titan_loop.models.dropout import Drawing, placed_like
from titan_loop.models.final_norm import FinalNorm
from titan_loop.models.initialisation import keep_shard
from titan_loop.models.sharding import mixed_states


class Bridge(Module):
    """Adds a projection of the prelude's normed output to the state."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Norm of the prelude's output; its width is the bridge's."""

        norm: FinalNorm.Config

        def set_sharding(self, *, enable_sp: bool) -> None:
            """Place norm and projection where the states are, both whole on every rank."""
            self.norm.sharding_config = norm_config(enable_sp=enable_sp)
            self.sharding_config = mixed_states("hidden_BLD", "prelude_BLD", enable_sp=enable_sp)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = config.norm.build()
        width = config.norm.normalized_shape
        self.weight = nn.Parameter(torch.empty(width, width))

    def forward(self, hidden_BLD: Tensor, prelude_BLD: Tensor) -> Tensor:
        """Return the next step's input."""
        return hidden_BLD + F.linear(self.norm(prelude_BLD), self.weight)


def bridge_config(width: int, eps: float) -> Bridge.Config:
    """Return a bridge of a width, with a projection of zeros."""
    norm = FinalNorm.Config(normalized_shape=width, eps=eps, param_init={"weight": nn.init.ones_})
    return Bridge.Config(norm=norm, param_init={"weight": partial(nn.init.constant_, val=0.0)})


class Mixer(Module):
    """Maps state and prelude's output, side by side, to the input of a step."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Width D."""

        dim: int

        def set_sharding(self, *, enable_sp: bool) -> None:
            """Place the map where the states are, whole on every rank."""
            self.sharding_config = mixed_states("hidden_BLD", "prelude_BLD", enable_sp=enable_sp)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.dim, 2 * config.dim))

    def forward(self, hidden_BLD: Tensor, prelude_BLD: Tensor) -> Tensor:
        """Return the step's input."""
        return F.linear(torch.cat((hidden_BLD, prelude_BLD), dim=-1), self.weight)


class Noise(Drawing):
    """Draws the state that the first step mixes with the prelude's output."""

    @dataclass(kw_only=True, slots=True)
    class Config(Drawing.Config):
        """Standard deviation σ of the noise."""

        std: float

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.std = config.std

    def forward(self, prelude_BLD: Tensor) -> Tensor:
        """Return noise in the shape, dtype and placements of the prelude's output."""
        if not self.training:
            return torch.zeros_like(prelude_BLD)
        drawn = self.std * torch.randn(prelude_BLD.shape, device=prelude_BLD.device)
        return placed_like(drawn.to(prelude_BLD.dtype), prelude_BLD)


def read_one(weight: Tensor, *, prelude: bool) -> None:
    """Fill A with [1, 0], which reads the state, or with [0, 1], which reads the prelude."""
    width = weight.shape[0]
    halves = torch.eye(width), torch.zeros(width, width)
    whole = torch.cat(halves[::-1] if prelude else halves, dim=1)
    if isinstance(weight, DTensor):
        keep_shard(weight, whole.to(weight.to_local()))
    else:
        weight.copy_(whole)
