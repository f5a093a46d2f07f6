"""Input injection: every recurrent step reads the embedding e, not only the first.

    additive   x_r = h_{r-1} + e,                    h_0 = 0
    diagonal   x_r = a ⊙ h_{r-1} + (1 − a) ⊙ e,      h_0 = e,   a = sigmoid(w) in (0, 1)

x_r is the input of step r's layers. If the layers were the identity, the diagonal form would
contract towards e at the learned rates a: injection itself never makes the state grow.

Source: Bansal et al. 2022, arXiv 2202.05826, §3 (there concatenated). The diagonal form is the
zero-order hold of dx/dt = −λ (x − e), as in diagonal state-space models (Gu et al. 2022, arXiv
2206.11893, §3).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torchtitan.protocols.module import Module

InjectionKind: TypeAlias = Literal["none", "additive", "diagonal"]
"""Form of the injection; "none" is Ouro's plain loop."""


class Injected(NamedTuple):
    """The carry of a loop with input injection: h_{r-1} and e, both (B, L, D)."""

    hidden_BLD: Tensor
    embedding_BLD: Tensor


class AdditiveInjection(Module):
    """Adds the embedding to the state."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """No settings."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def start(self, embedding_BLD: Tensor) -> Injected:
        """Return the carry of step 1."""
        return Injected(torch.zeros_like(embedding_BLD), embedding_BLD)

    def forward(self, hidden_BLD: Tensor, embedding_BLD: Tensor) -> Tensor:
        """Return x_r."""
        return hidden_BLD + embedding_BLD


class DiagonalInjection(AdditiveInjection):
    """Mixes state and embedding at a learned rate for each dimension, in at least fp32."""

    @dataclass(kw_only=True, slots=True)
    class Config(AdditiveInjection.Config):
        dim: int

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(config.dim))

    def start(self, embedding_BLD: Tensor) -> Injected:
        return Injected(embedding_BLD, embedding_BLD)

    def forward(self, hidden_BLD: Tensor, embedding_BLD: Tensor) -> Tensor:
        rate_D = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)).sigmoid()
        mixed_BLD = embedding_BLD + rate_D * (hidden_BLD - embedding_BLD)
        return mixed_BLD.to(hidden_BLD.dtype)
