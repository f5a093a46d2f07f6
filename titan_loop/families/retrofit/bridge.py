"""The bridge: from the second step on, the loop reads the prelude's output again.

    x_{r+1} = h_r + W RMSNorm(e)

e is the output of the prelude. W starts at zero, so that a model with an untrained bridge is the
bare loop, and with one step it is the dense model whatever W is.

Source: Shapiro 2026, arXiv 2608.11233, §3. Deviation: RMSNorm, as in the rest of a Llama, in place
of LayerNorm.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.common.decoder_sharding import norm_config
from torchtitan.protocols.module import Module

from titan_loop.models.final_norm import FinalNorm
from titan_loop.models.sharding import mixed_states


class Bridge(Module):
    """Adds a projection of the prelude's normed output to the state."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """The norm, which has the width."""

        norm: FinalNorm.Config

        def set_sharding(self, *, enable_sp: bool) -> None:
            """Place norm and projection where the states are, each rank with all of both."""
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
