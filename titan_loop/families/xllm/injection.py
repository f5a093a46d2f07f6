"""Injections: every update of the core reads e, the prelude's output, again.

    diagonal     x = h' + u,                                h' = exp(−Δ a) ⊙ h,   u = Δ ⊙ W e
    orthogonal   x = h' − ⟨h', u⟩ / (⟨u, u⟩ + ε) u + u
    linear       x = A [h; e] + b

x is the core's input. Δ = softplus(δ) and a = exp(α) are vectors of width D; W starts as the
identity. The orthogonal form removes the decayed state's component along the update u, so that
repeated injections cannot accumulate along it; its inner products are over the width, in at least
fp32.

| symbol | code |
|---|---|
| W, A | `weight` |
| b | `bias` |
| α, δ | `log_decay`, `step_bias` |
| ε | `PROJECTION_EPS` |

Source: Huang et al. 2026 (xLLM-Loop, "Towards Looped Models Done Right" I and II), arXiv
2610.06833, and their code.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_loop.models.initialisation import keep_shard, normal_matrix
from titan_loop.models.injection import AdditiveInjection

Injection: TypeAlias = Literal["none", "diagonal", "linear", "orthogonal"]

PROJECTION_EPS = 1e-6


class DiagonalInjection(AdditiveInjection):
    """Decays the state and adds a projection of e, with learned rates for each dimension."""

    @dataclass(kw_only=True, slots=True)
    class Config(AdditiveInjection.Config):
        """Width D."""

        dim: int

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(config.dim, config.dim))
        self.log_decay = nn.Parameter(torch.empty(config.dim))
        self.step_bias = nn.Parameter(torch.empty(config.dim))

    def parts(self, hidden_BLD: Tensor, embedding_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the decayed state h' and the update u."""
        step_D = F.softplus(self.step_bias).to(hidden_BLD.dtype)
        decay_D = (-step_D * self.log_decay.exp().to(hidden_BLD.dtype)).exp()
        return hidden_BLD * decay_D, step_D * F.linear(embedding_BLD, self.weight)

    def forward(self, hidden_BLD: Tensor, embedding_BLD: Tensor) -> Tensor:
        decayed_BLD, update_BLD = self.parts(hidden_BLD, embedding_BLD)
        return decayed_BLD + update_BLD


class OrthogonalInjection(DiagonalInjection):
    """The diagonal form without the decayed state's component along the update."""

    @dataclass(kw_only=True, slots=True)
    class Config(DiagonalInjection.Config):
        """Width D."""

    def forward(self, hidden_BLD: Tensor, embedding_BLD: Tensor) -> Tensor:
        decayed_BLD, update_BLD = self.parts(hidden_BLD, embedding_BLD)
        dtype = torch.promote_types(decayed_BLD.dtype, torch.float32)
        state_BLD, along_BLD = decayed_BLD.to(dtype), update_BLD.to(dtype)
        length_BL1 = along_BLD.square().sum(dim=-1, keepdim=True) + PROJECTION_EPS
        share_BL1 = (state_BLD * along_BLD).sum(dim=-1, keepdim=True) / length_BL1
        return (state_BLD - share_BL1 * along_BLD).to(decayed_BLD.dtype) + update_BLD


class LinearInjection(AdditiveInjection):
    """Maps state and e, side by side, to the core's input."""

    @dataclass(kw_only=True, slots=True)
    class Config(AdditiveInjection.Config):
        """Width D."""

        dim: int

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(config.dim, 2 * config.dim))
        self.bias = nn.Parameter(torch.empty(config.dim))

    def forward(self, hidden_BLD: Tensor, embedding_BLD: Tensor) -> Tensor:
        return F.linear(torch.cat((hidden_BLD, embedding_BLD), dim=-1), self.weight, self.bias)


def injection_config(
    kind: Injection, dim: int, *, step: float, std: float
) -> AdditiveInjection.Config | None:
    """Return the config of an injection of width `dim`; None for kind "none".

    Args:
        step: Δ before training, above 0; a starts at 1.
        std: Standard deviation of the initial A.
    """
    if kind == "none":
        return None
    if kind == "linear":
        matrix = partial(normal_matrix, std=std)
        return LinearInjection.Config(
            dim=dim, param_init={"weight": matrix, "bias": nn.init.zeros_}
        )
    bias = step + math.log(-math.expm1(-step))  # the inverse of softplus
    start = {
        "weight": _identity,
        "log_decay": nn.init.zeros_,
        "step_bias": partial(nn.init.constant_, val=bias),
    }
    found = DiagonalInjection if kind == "diagonal" else OrthogonalInjection
    return found.Config(dim=dim, param_init=start)


def _identity(weight: Tensor) -> None:
    if isinstance(weight, DTensor):
        local = weight.to_local()
        keep_shard(weight, torch.eye(weight.shape[0], dtype=local.dtype, device=local.device))
    else:
        nn.init.eye_(weight)
