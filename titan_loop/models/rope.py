"""Rotary position embedding, rotate-half form, gathered once per forward pass.

A looped model visits each layer R times with the same positions. The table of cosines and sines
therefore belongs to the decoder, its rows are gathered once, and each visit only applies them
(upstream keeps one table a layer and gathers at every visit).

Source: Su et al. 2021, arXiv 2104.09864; the split-half pairing of the released Ouro checkpoints.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torchtitan.models.common.rope import CosSinRoPE, RoPE
from torchtitan.protocols.module import Module


class RopeTable(CosSinRoPE):
    """Cosines and sines of all positions, fp32; rebuilt from the config, never saved."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """Table length, width and base."""

    def rows(self, positions_BL: Tensor) -> Tensor:
        """Gather the rows of `positions_BL`.

        Args:
            positions_BL: (B or 1, L) integers in [0, max_seq_len).

        Returns:
            (B or 1, L, 1, 2·H) fp32: cosines, then sines.
        """
        return self.cache[positions_BL].unsqueeze(2)


class RotateHalf(RoPE):
    """Applies gathered rows to queries and keys; has no state of its own.

    Deviations: computes in at least fp32 and keeps float64, which upstream rounds to fp32.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoPE.Config):
        """Width, length and base of the decoder's table, kept where upstream looks for them."""

    def __init__(self, config: Config) -> None:
        Module.__init__(self)
        self.config = config

    def forward(  # type: ignore[override]  rows instead of positions
        self, query: Tensor, key: Tensor, *, rope_BLH: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotate `query` and `key`, both (B, L, N, H); shapes and dtypes are kept."""
        cos, sin = rope_BLH.chunk(2, dim=-1)
        return _rotate(query, cos, sin), _rotate(key, cos, sin)

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        """Nothing to initialise: the table is the decoder's."""


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
