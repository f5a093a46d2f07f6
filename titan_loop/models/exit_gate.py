"""The learned exit: one logit per token and recurrent step, always in fp32.

    λ_r = sigmoid(w·h_r + b)

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §3.2, Eq. 3.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm


class ExitGate(Linear):
    """Linear(D → 1) with bias, computed in fp32 whatever the dtype of the hidden state.

    In bf16 the cumulated exit probability rounds to 1 early, and "the last step" silently becomes
    an earlier one.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Input width; one output and a bias."""

        out_features: int = 1
        bias: bool = True

    def forward(self, input: Tensor) -> Tensor:
        """Map hidden states (B, L, D) to exit logits (B, L), at least fp32."""
        wide = torch.promote_types(input.dtype, torch.float32)
        logit_BL1 = F.linear(input.to(wide), self.weight.to(wide), self.bias.to(wide))
        return logit_BL1.squeeze(-1).clone()  # FSDP cannot hook a view safely, and this is small


class FinalNorm(RMSNorm):
    """RMSNorm that keeps its input's dtype when mixed precision holds its weight in fp32."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """Width and epsilon."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (B, L, D) over D."""
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)
