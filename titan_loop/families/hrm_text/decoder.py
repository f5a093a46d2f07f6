"""Two stacks of layers that take turns: R high cycles, each of T low cycles and a high pass.

    z_H = s·embed(x),   z_L = l_0
    for r = 1 … R:
        T times:  z_L ← n(L(z_L + z_H))
        z_H ← n(H(z_H + z_L))

A high cycle is a recurrent step, so R may differ from batch to batch. With
`recurrence.backward_steps` = k, only k passes have a gradient: the last min(R, k − 1) passes of H,
at least one, and the last passes of L. The results of all earlier passes are constants.

Source: Wang et al. 2026 (HRM-Text), arXiv 2605.20613, and its released code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchtitan.models.common.decoder_sharding import norm_config

from titan_loop.models.context import PREFIX, LoopContext
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.decoder_costs import LayerVisits
from titan_loop.models.gpt2_block import StateBias
from titan_loop.models.recurrence import Carry
from titan_loop.models.units import Unit


class Streams(NamedTuple):
    """z_H and z_L, (B, L, D) each."""

    high_BLD: Tensor
    low_BLD: Tensor


class HrmDecoder(LoopDecoder):
    """A decoder of two stacks; with PrefixLM a prompt's tokens see each other both ways."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoopDecoder.Config):
        """Layers of both stacks, their schedule and the mask."""

        low_start: StateBias.Config
        low_cycles: int
        prefix_lm: bool

        @property
        def columns(self) -> tuple[str, ...]:
            """With PrefixLM, the column that marks the tokens of prompts."""
            return (PREFIX,) if self.prefix_lm else ()

        def set_sharding(self, *, enable_sp: bool) -> None:
            """As in the base class; both streams are placed like a state."""
            LoopDecoder.Config.set_sharding(self, enable_sp=enable_sp)
            self.low_start.sharding_config = norm_config(enable_sp=enable_sp)

        def layer_visits(
            self, recurrent_steps: float, backward_steps: float | None = None
        ) -> LayerVisits:
            """Return the visits of both stacks; a backward step is a pass of one of them."""
            passes = recurrent_steps * (self.low_cycles + 1)
            reached = passes if backward_steps is None else min(passes, backward_steps)
            of_a_stack = len(self.layers) // 2
            return LayerVisits(passes * of_a_stack, reached * of_a_stack)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.low_start = config.low_start.build().requires_grad_(False)

    def start(self, tokens: Tensor, context: LoopContext) -> Streams:
        """Return both streams before the first cycle."""
        embedding_BLD = super().start(tokens, context)
        return Streams(embedding_BLD, self.low_start(torch.zeros_like(embedding_BLD)))

    def step(self, carry: Carry, step: int | Tensor, context: LoopContext) -> Any:
        """Run one high cycle."""
        (high_BLD, low_BLD), cycles = carry, self.config.low_cycles
        half = len(self.layers) // 2
        low, high = range(half), range(half, 2 * half)
        low_reached, high_reached = self._reached(step)
        grad = torch.is_grad_enabled()
        # A cache has one slot for every pass and layer, in the order in which they run.
        for cycle in range(cycles):
            with torch.set_grad_enabled(grad and cycle >= cycles - low_reached):
                low_BLD = self._visit(low, low_BLD + high_BLD, context, step, cycle * half)
                low_BLD = self.norm(low_BLD)
        with torch.set_grad_enabled(grad and high_reached):
            high_BLD = self._visit(high, high_BLD + low_BLD, context, step, (cycles - 1) * half)
            return Streams(self.norm(high_BLD), low_BLD)

    def _reached(self, step: int | Tensor) -> tuple[int, bool]:
        """Return the number of a step's last low cycles with a gradient, and whether H has one."""
        reached, cycles = self.recurrence.backward_steps, self.config.low_cycles
        if reached is None or not isinstance(step, int):
            return cycles, True
        later, high = self.recurrence.recurrent_steps - step, max(1, reached - 1)
        low = reached - min(high, self.recurrence.recurrent_steps)
        return max(0, min(cycles, low - later * cycles)), later < high

    def advance(
        self, carry: Carry, hidden_BLD: Any, step: int | Tensor, context: LoopContext
    ) -> Streams:
        """Return both streams as the step left them."""
        return hidden_BLD

    def read(
        self, hidden_BLD: Any, context: LoopContext, step: int | Tensor | None = None
    ) -> Tensor:
        """Return z_H, which ends in a norm."""
        return hidden_BLD.high_BLD

    def prompt_columns(self, tokens_BL: Tensor, prefix_B: Tensor) -> Mapping[str, Tensor] | None:
        if not self.config.prefix_lm:
            return None
        place_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
        return {PREFIX: place_L < prefix_B.unsqueeze(1)}

    def units(self) -> list[Unit]:
        """As in the base class, with the low stream's start."""
        start = Unit("low start", (self.low_start,), place="before", kept=True)
        return [start, *super().units()]

    def cache_slots(self, recurrent_steps: int) -> tuple[int, int, int]:
        """Return R, and a slot for each layer in every pass of its stack in a high cycle."""
        return recurrent_steps, (self.config.low_cycles + 1) * len(self.layers) // 2, 0
