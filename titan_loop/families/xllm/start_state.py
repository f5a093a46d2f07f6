"""The state before the first recurrent update: zeros, the prelude's output, or noise.

Noise is N(0, 1/D). Training draws it anew in every forward pass. An evaluation must be repeatable,
so it computes a fixed value for every position p in a document and every dimension d:

    √(2/D) · erf⁻¹(2 frac(43758.5453123 sin(0.013579 d + 0.021713 p + 0.123457)) − 1)

Source: the code of xLLM-Loop. Deviation: their value also depends on the row of the batch; here
every row gets the first row's values, so that an answer does not depend on its place in a batch.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from titan_loop.models.dropout import Drawing, placed_like

Start: TypeAlias = Literal["normal", "zero", "input"]


class StartState(Drawing):
    """Makes the first state from the prelude's output."""

    @dataclass(kw_only=True, slots=True)
    class Config(Drawing.Config):
        """Kind of start."""

        kind: Start

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.kind = config.kind

    def forward(self, prelude_BLD: Tensor, positions_BL: Tensor) -> Tensor:
        """Return the state, with the shape, dtype and placements of the prelude's output."""
        if self.kind == "input":
            return prelude_BLD
        if self.kind == "zero":
            return torch.zeros_like(prelude_BLD)
        dim = prelude_BLD.shape[-1]
        if self.training:
            noise_BLD = torch.randn(prelude_BLD.shape, device=prelude_BLD.device) * dim**-0.5
        else:
            noise_BLD = fixed_noise(positions_BL, dim).expand(prelude_BLD.shape)
        return placed_like(noise_BLD.to(prelude_BLD.dtype), prelude_BLD)


def fixed_noise(positions_BL: Tensor, dim: int) -> Tensor:
    """Return repeatable, roughly normal fp32 noise of variance 1/D, (B or 1, L, D)."""
    place_D = torch.arange(dim, device=positions_BL.device, dtype=torch.float32)
    phase_BLD = place_D * 0.013579 + positions_BL.unsqueeze(-1).float() * 0.021713
    hashed_BLD = (phase_BLD + 0.123457).sin() * 43758.5453123
    uniform_BLD = (hashed_BLD - hashed_BLD.floor()).clamp(1e-6, 1.0 - 1e-6)
    return (2 * uniform_BLD - 1).erfinv() * math.sqrt(2.0 / dim)
