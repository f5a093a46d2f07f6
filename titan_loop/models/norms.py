"""RMSNorms of dense models: with the gain 1 + w, and over all heads at once."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.nn_modules import RMSNorm

from titan_loop.models.final_norm import FinalNorm


class OffsetNorm(FinalNorm):
    """n(x) ⊙ (1 + w), computed in at least fp32.

    Source: the released code of Gemma; weights are stored near 0.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FinalNorm.Config):
        """As in `RMSNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last axis; the dtype is kept."""
        wide = torch.promote_types(x.dtype, torch.float32)
        gain = 1 + self.weight.to(wide)
        return F.rms_norm(x.to(wide), self.normalized_shape, gain, self.eps).to(x.dtype)


class AllHeadsNorm(RMSNorm):
    """A norm of all heads of a token together; (B, L, N, H) in and out, with N·H gains.

    Source: OLMo team 2025 (OLMo 2), arXiv 2501.00656, §3.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """As in `RMSNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over heads and their elements."""
        return super().forward(x.flatten(2)).unflatten(2, x.shape[2:])
