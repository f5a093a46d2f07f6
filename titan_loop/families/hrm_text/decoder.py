"""Two stacks of layers that take turns: R high cycles, each of T low cycles and a high pass.

    z_H = s·embed(x),   z_L = l_0
    for r = 1 … R:
        T times:  z_L ← n(L(z_L + z_H))
        z_H ← n(H(z_H + z_L))
    logits = W z_H
    layer:  x ← x + W_o(σ(W_g n(x)) ⊙ attention(n(x))),   x ← x + SwiGLU(n(x))

A high cycle is a recurrent step, so R may differ from batch to batch. With
`recurrence.backward_steps` = k the gradient passes through the last min(R, k − 1) passes of H and
as many of the last low cycles as are left of k; what ran before is a constant.

| symbol | code |
|---|---|
| L, H | the first and the second half of `layers`, T = `low_cycles` |
| z_H, z_L | `Streams`, the carry and the state after a step; `read` returns z_H |
| n | RMSNorm without a gain |
| l_0 | `low_start`, drawn once and never trained |
| s | `embedding_scale` |

Source: Wang et al. 2026 (HRM-Text), arXiv 2605.20613, and its released code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchtitan.models.common.attention import FlexAttention, create_attention_mask
from torchtitan.models.common.decoder_sharding import colwise_config
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module

from titan_loop.data.prefix import PREFIX
from titan_loop.errors import UserError
from titan_loop.models.attention import LoopAttention, document_mask
from titan_loop.models.block import PreNormBlock
from titan_loop.models.context import AttentionMask, CacheSlot, LoopContext
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.flops import LayerVisits
from titan_loop.models.recurrence import Carry
from titan_loop.models.sharding import mixed_states
from titan_loop.models.units import Unit


class GatedAttention(LoopAttention):
    """Attention whose heads' outputs are scaled by a sigmoid gate of the input."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoopAttention.Config):
        """Attention, and the gate's projection."""

        gate: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.gate = config.gate.build()

    def attended(self, x_BLD: Tensor, context: LoopContext, cache_slot: CacheSlot | None) -> Tensor:
        """As of the base class, gated."""
        return self.gate(x_BLD).sigmoid() * super().attended(x_BLD, context, cache_slot)


class GatedBlock(PreNormBlock):
    """Llama's block with gated attention and norms without gains."""

    @dataclass(kw_only=True, slots=True)
    class Config(PreNormBlock.Config):
        """As of the base class."""

        @property
        def matrix_elements(self) -> int:
            """As of the base class, with the gate."""
            inherited = PreNormBlock.Config.matrix_elements.fget(self)  # type: ignore[attr-defined]
            gate = self.attention.gate  # type: ignore[attr-defined]
            return inherited + gate.in_features * gate.out_features


class LowStart(Module):
    """The state from which every token's low stream starts."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Width D."""

        dim: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.dim), requires_grad=False)

    def forward(self, embedding_BLD: Tensor) -> Tensor:
        """Return the state of every token, placed like its embedding."""
        return torch.zeros_like(embedding_BLD) + self.weight.to(embedding_BLD.dtype)


class Streams(NamedTuple):
    """z_H and z_L, (B, L, D) each."""

    high_BLD: Tensor
    low_BLD: Tensor


class HrmDecoder(LoopDecoder):
    """A decoder of two stacks, for text of prompts and answers."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoopDecoder.Config):
        """Layers of both stacks, their schedule and the mask."""

        low_start: LowStart.Config
        low_cycles: int
        embedding_scale: float
        prefix_lm: bool

        @property
        def columns(self) -> tuple[str, ...]:
            """The prompts' tokens, which see each other, with PrefixLM."""
            return (PREFIX.name,) if self.prefix_lm else ()

        @property
        def stack_layers(self) -> int:
            """Layers of each stack."""
            return len(self.layers) // 2

        def set_sharding(self, *, enable_sp: bool) -> None:
            """As of the base class; both streams are where the state is."""
            LoopDecoder.Config.set_sharding(self, enable_sp=enable_sp)
            self.low_start.sharding_config = mixed_states("embedding_BLD", enable_sp=enable_sp)

        def set_layer_sharding(self, layer: Any, *, enable_sp: bool) -> None:
            """As of the base class; the gate is split over the heads."""
            LoopDecoder.Config.set_layer_sharding(self, layer, enable_sp=enable_sp)
            layer.attention.gate.sharding_config = colwise_config()

        def check_spreading(self, *, tensor_parallel: int, context_parallel: int) -> None:
            """As of the base class; PrefixLM needs whole windows."""
            if self.prefix_lm and context_parallel > 1:
                raise UserError(
                    f"parallelism.context_parallel_degree={context_parallel} does not work with "
                    "model.prefix_lm=True, whose masks need whole windows; leave it at 1, or set "
                    "--model.no-prefix-lm"
                )
            LoopDecoder.Config.check_spreading(
                self, tensor_parallel=tensor_parallel, context_parallel=context_parallel
            )

        def layer_visits(
            self, recurrent_steps: float, backward_steps: float | None = None
        ) -> LayerVisits:
            """Return the visits of both stacks; a backward step is a pass of one of them."""
            passes = recurrent_steps * (self.low_cycles + 1)
            reached = passes if backward_steps is None else min(passes, backward_steps)
            return LayerVisits(passes * self.stack_layers, reached * self.stack_layers)

        def architecture(self) -> dict[str, Any]:
            """As of the base class, with the schedule, the mask and the scales."""
            return {
                **LoopDecoder.Config.architecture(self),
                "low_cycles": self.low_cycles,
                "prefix_lm": self.prefix_lm,
                "embedding_scale": self.embedding_scale,
                "norm_eps": self.norm.eps,
            }

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.low_start = config.low_start.build()

    def scaled(self, embedding_BLD: Tensor) -> Tensor:
        """Return embeddings of tokens as they enter the high stream."""
        return embedding_BLD * self.config.embedding_scale

    def start(self, tokens: Tensor, context: LoopContext) -> Streams:
        """Return both streams before the first cycle."""
        embedding_BLD = super().start(tokens, context)
        return Streams(embedding_BLD, self.low_start(embedding_BLD))

    def step(self, carry: Carry, step: int | Tensor, context: LoopContext) -> Any:
        """Run one high cycle; arguments as in the base class."""
        (high_BLD, low_BLD), half, cycles = carry, self.config.stack_layers, self.config.low_cycles
        low_reached, high_reached = self._reached(step)
        grad = torch.is_grad_enabled()
        for cycle in range(cycles):
            with torch.set_grad_enabled(grad and cycle >= cycles - low_reached):
                mixed_BLD = low_BLD + high_BLD
                low_BLD = self._pass(range(half), mixed_BLD, context, step, cycle * half)
        with torch.set_grad_enabled(grad and high_reached):
            mixed_BLD, high = high_BLD + low_BLD, range(half, 2 * half)
            # A cache has one slot for every pass and layer, in the order in which they run.
            high_BLD = self._pass(high, mixed_BLD, context, step, (cycles - 1) * half)
        return Streams(high_BLD, low_BLD)

    def _pass(self, layers: range, mixed_BLD: Tensor, *where: Any) -> Tensor:
        return self.norm(self._visit(layers, mixed_BLD, *where))

    def _reached(self, step: int | Tensor) -> tuple[int, bool]:
        """Return how many of a step's last low cycles have a gradient, and whether H has one."""
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

    def read(self, hidden_BLD: Any, context: LoopContext) -> Tensor:
        """Return z_H, which ends in a norm."""
        return hidden_BLD.high_BLD

    def make_context(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention_masks: AttentionMask | None = None,
        *others: Any,
        columns: Mapping[str, Tensor] | None = None,
        **named: Any,
    ) -> LoopContext:
        """As of the base class; the tokens of a prompt see each other."""
        prefix_BL = None if columns is None else columns.get(PREFIX.name)
        if attention_masks is None and prefix_BL is not None:
            if positions is None:
                positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
            attention_masks = self._prefix_mask(positions, prefix_BL)
        return super().make_context(
            tokens, positions, attention_masks, *others, columns=columns, **named
        )

    def _prefix_mask(self, positions_BL: Tensor, prefix_BL: Tensor) -> AttentionMask:
        """Return the mask in which a prompt's tokens also see later ones of the same prompt."""
        document_BL = (positions_BL == 0).cumsum(dim=1)
        kernel = self.config.layers[0].attention.inner_attention
        if not isinstance(kernel, FlexAttention.Config):
            prompt_BL = document_BL.masked_fill(~prefix_BL, 0)
            prompt_BLS = (prompt_BL.unsqueeze(2) == prompt_BL.unsqueeze(1)) & prefix_BL.unsqueeze(2)
            return document_mask(positions_BL) | prompt_BLS.unsqueeze(1)

        def allowed(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            prompt = prefix_BL[b, query] & prefix_BL[b, key]
            return (document_BL[b, query] == document_BL[b, key]) & ((query >= key) | prompt)

        count, length = positions_BL.shape
        size = kernel.block_size
        return create_attention_mask(
            allowed, B=count, H=None, Q_LEN=length, KV_LEN=length, BLOCK_SIZE=size,
            device=positions_BL.device,
        )  # fmt: skip

    def prompt_columns(self, tokens_BL: Tensor, lengths_B: Tensor) -> Mapping[str, Tensor] | None:
        """As of the base class; a whole prompt is a prefix."""
        if not self.config.prefix_lm:
            return None
        place_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
        return {PREFIX.name: place_L < lengths_B.unsqueeze(1)}

    def units(self) -> list[Unit]:
        """As of the base class, with the low stream's start."""
        start = Unit("low start", (self.low_start,), place="before", fp32=True, kept=True)
        return [start, *super().units()]

    def cache_slots(self, recurrent_steps: int) -> tuple[int, int, int]:
        """Return a slot for every pass of a cycle and layer of its stack."""
        return recurrent_steps, (self.config.low_cycles + 1) * self.config.stack_layers, 0
