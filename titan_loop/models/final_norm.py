"""The norm that ends every recurrent step, or runs only before head and gate."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor
from torchtitan.models.common.nn_modules import RMSNorm

NormPlacement: TypeAlias = Literal["every_step", "readout"]
"""Place of the final norm: after every recurrent step, or only before head and gate."""


class FinalNorm(RMSNorm):
    """RMSNorm that keeps its input's dtype when mixed precision holds its weight in fp32."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """As in `RMSNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (B, L, D) over D."""
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)
