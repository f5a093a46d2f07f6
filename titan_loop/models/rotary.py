"""Rotary tables for long contexts: inverse frequencies under each published scaling.

    angle(p, i) = p · f_i,   f_i = θ^(−2i/d),   i < d/2,   d = rotated elements of a head

    linear  f_i / factor
    llama3  f_i / factor for wavelengths above original/low, f_i below original/high, mixed between
    yarn    mixed likewise, between the elements that turn `high` and `low` times in `original`
            tokens; cosines and sines are times `attention_factor`

Sources: Chen et al. 2023, arXiv 2306.15595 (linear); Llama 3, arXiv 2407.21783, as released; Peng
et al. 2023 (YaRN), arXiv 2309.00071, §3. torchtitan 0.3.0 has no llama3 scaling for split halves.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torchtitan.models.common.rope import CosSinRoPE

RopeScaling: TypeAlias = Literal["none", "linear", "llama3", "yarn"]
"""Kinds of scaled rotations."""


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """A base and its scaling.

    Attributes:
        dim: d, rotated elements of a head.
        theta: θ.
        factor: Growth of the window over `original` tokens.
        low: llama3's low_freq_factor, or yarn's beta_slow.
        high: llama3's high_freq_factor, or yarn's beta_fast.
        attention_factor: Factor on cosines and sines.
        truncate: Whether yarn's bounds are whole elements.
    """

    dim: int
    theta: float
    scaling: RopeScaling = "none"
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def frequencies(self) -> Tensor:
        """Return f, (d/2,), fp32."""
        plain_F = 1.0 / (self.theta ** (torch.arange(0, self.dim, 2).float() / self.dim))
        if self.scaling == "linear":
            return plain_F / self.factor
        if self.scaling == "llama3":
            wavelength_F = 2 * math.pi / plain_F
            mixed_F = (self.original / wavelength_F - self.low) / (self.high - self.low)
            slow_F = plain_F / self.factor
            between_F = (1 - mixed_F) * slow_F + mixed_F * plain_F
            between_F = torch.where(wavelength_F > self.original / self.low, slow_F, between_F)
            return torch.where(wavelength_F < self.original / self.high, plain_F, between_F)
        if self.scaling == "yarn":
            first, last = self._element(self.high), self._element(self.low)
            if self.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, self.dim - 1)
            if first == last:
                last += 0.001
            ramp_F = (torch.arange(self.dim // 2).float() - first) / (last - first)
            slow_F = ramp_F.clamp(0, 1)
            return plain_F / self.factor * slow_F + plain_F * (1 - slow_F)
        return plain_F

    def _element(self, turns: float) -> float:
        """Return the element that turns so many times over the original window."""
        turned = self.original / (turns * 2 * math.pi)
        return self.dim * math.log(turned) / (2 * math.log(self.theta))


class RotationTable(CosSinRoPE):
    """Cosines and sines of every position, (tokens, 2·d), of a `Rotation`.

    Sines of the first half are negative: x ⊙ cos + swapped(x) ⊙ sin is the rotation, where the
    halves of `swapped(x)` are exchanged.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """The rotation; `dim` and `theta` are its own."""

        rotation: Rotation

    def _precompute_cache(self) -> Tensor:
        config = self.config
        assert isinstance(config, RotationTable.Config)
        # fp32 on every device: a default dtype of bf16 would round the frequencies.
        frequency_F = config.rotation.frequencies()
        angle_PF = torch.outer(torch.arange(config.max_seq_len).float(), frequency_F)
        factor = config.rotation.attention_factor
        cos_PF, sin_PF = angle_PF.cos() * factor, angle_PF.sin() * factor
        return torch.cat((cos_PF, cos_PF, -sin_PF, sin_PF), dim=-1)
