"""Dropout of embeddings and branch outputs, correct under recomputation and parallelism.

Every tensor-parallel rank draws the mask of the whole tensor from a default generator in the same
state, and keeps its part. Activation checkpointing restores the generator before it recomputes. The
trainer seeds it before every micro-batch (`seed_dropout`), so a resumed run draws the same masks,
and ranks with different tokens draw different ones.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torchtitan.protocols.module import Module

from titan_loop.models.initialisation import placed_like


class Drawing(Module):
    """A module that draws from the default generator in training."""


class Dropout(Drawing):
    """Zeroes a share of the elements in training, and scales the rest so that the mean stays."""

    @dataclass(kw_only=True, slots=True)
    class Config(Drawing.Config):
        """Share of the elements that is zeroed, in [0, 1)."""

        rate: float

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.rate = config.rate

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape, dtype and placements."""
        if not self.training:
            return x
        kept = (torch.rand(x.shape, device=x.device) >= self.rate).to(x.dtype)
        return x * placed_like(kept, x) / (1 - self.rate)


def dropout_config(rate: float) -> Dropout.Config | None:
    """Return the config for a rate; None for 0."""
    return Dropout.Config(rate=rate) if rate else None


def draws(model: nn.Module) -> bool:
    """Return whether a model draws random numbers in training."""
    return any(isinstance(module, Drawing) for module in model.modules())


def seed_dropout(model: nn.Module, *key: int) -> None:
    """Seed the default generator from the integers of `key`, if the model draws from it."""
    if draws(model):
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1))
