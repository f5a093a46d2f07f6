"""Llama's blocks looped, whose later loops attend twice: to the first loop, and to themselves.

    step 1:  heads = A(q_1, K_1, V_1)
    step r:  heads = g A(q_r, K_1, V_1) + (1 − g) A_W(q_r, K_r, V_r),   g = σ(w · q_r + b)

A sees all keys, A_W the latest W. w and b are a vector and a number of each head; queries and keys
are rotated. The first loop's keys and values are part of the carry: steps before the ones that the
backward pass reaches hand them on as constants.

Source: the code of IQuest-LoopCoder in mlx-lm 0.32.2 and vLLM 0.32 (R = 2). Deviation: g is
computed in at least fp32.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torchtitan.models.common.decoder_sharding import (
    dense_activation_placement,
    dense_param_placement,
)
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig, SpmdLayout

from titan_loop.models.attention import LoopAttention
from titan_loop.models.block import DenseBlock
from titan_loop.models.context import CacheSlot, LoopContext, WindowedMasks
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.decoder_costs import Flops
from titan_loop.models.recurrence import Carry

Pair = tuple[Tensor, Tensor]
"""Rotated keys, and values, of one layer: (B, L, N_kv, H) each."""


class Passed(NamedTuple):
    """State after a step, (B, L, D), and the first step's keys and values of every looped layer."""

    hidden_BLD: Tensor
    first: tuple[Pair, ...]


class HeadGate(Module):
    """g a + (1 − g) b with a gate g of every head and token, σ(w · q + b), in at least fp32."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        n_heads: int
        head_dim: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_heads, config.head_dim))
        self.bias = nn.Parameter(torch.empty(config.n_heads))

    def forward(self, q_BLNH: Tensor, global_BLNH: Tensor, local_BLNH: Tensor) -> Tensor:
        """Return the mixed heads, (B, L, N, H)."""
        wide = torch.promote_types(q_BLNH.dtype, torch.float32)
        logit_BLN = (q_BLNH.to(wide) * self.weight.to(wide)).sum(-1) + self.bias.to(wide)
        share_BLN1 = logit_BLN.sigmoid().unsqueeze(-1)
        mixed_BLNH = share_BLN1 * global_BLNH + (1 - share_BLN1) * local_BLNH
        return mixed_BLNH.to(q_BLNH.dtype)


class TwoReachAttention(LoopAttention):
    """Attention to the first step's keys, and from step 2 on to a window of the step's own, too."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoopAttention.Config):
        """`window` is W."""

        mix: HeadGate.Config

        @classmethod
        def of(
            cls, one: LoopAttention.Config, window: int, mix: HeadGate.Config
        ) -> "TwoReachAttention.Config":
            """Return attention of the shape of `one`."""
            shape = {each.name: getattr(one, each.name) for each in fields(one)}
            return cls(**{**shape, "window": window}, mix=mix)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.mix = config.mix.build()

    def forward(  # type: ignore[override]  it returns keys and values, too
        self,
        x_BLD: Tensor,
        context: LoopContext,
        cache_slot: CacheSlot | None = None,
        *,
        first: Pair | None = None,
    ) -> tuple[Tensor, Pair]:
        """Attend to a normed input; return it projected back, and the first step's new pair.

        `first` is that pair; None at step 1. With a cache rows may be at different steps.
        """
        assert cache_slot is not None
        assert isinstance(context.attention_mask, WindowedMasks)
        step, cache = cache_slot.step, context.cache
        q_BLNH, *own = self._projected(x_BLD, context._replace(cache=None), cache_slot)
        pair: Pair = (own[0], own[1])
        if first is None:
            first = pair
        elif isinstance(step, Tensor):
            starts_B111 = (step == 1).view(-1, 1, 1, 1)
            first = (
                torch.where(starts_B111, pair[0], first[0]),
                torch.where(starts_B111, pair[1], first[1]),
            )
        seen = first
        if cache is not None:
            seen = cache.update(CacheSlot(1, cache_slot.layer), *first)
        heads_BLNH = self._attended(q_BLNH, seen, context.attention_mask.whole)
        if isinstance(step, Tensor) or step != 1:
            near, mask = pair, context.attention_mask.window
            if cache is not None:
                near = cache.update(cache_slot, *pair)
                if near[0].shape[1] < mask.shape[-1]:
                    # The cache has W slots, of which a token's own is the latest that was written.
                    slot_W = torch.arange(near[0].shape[1], device=x_BLD.device)
                    mask = (slot_W <= context.positions_BL.unsqueeze(-1)).unsqueeze(1)
            mixed_BLNH = self.mix(q_BLNH, heads_BLNH, self._attended(q_BLNH, near, mask))
            if isinstance(step, Tensor):
                mixed_BLNH = torch.where((step == 1).view(-1, 1, 1, 1), heads_BLNH, mixed_BLNH)
            heads_BLNH = mixed_BLNH
        return self.wo(heads_BLNH.contiguous().flatten(2)), first

    def _attended(self, q_BLNH: Tensor, pair: Pair, mask: object) -> Tensor:
        return self.inner_attention(
            q_BLNH, *pair, attention_masks=mask, scale=self.scaling, enable_gqa=self.enable_gqa
        )


class LoopCoderBlock(DenseBlock):
    """Llama's block that takes and returns the first step's keys and values."""

    @dataclass(kw_only=True, slots=True)
    class Config(DenseBlock.Config):
        """As in the base class, with `TwoReachAttention`."""

    def forward(  # type: ignore[override]
        self,
        x_BLD: Tensor,
        context: LoopContext,
        cache_slot: CacheSlot | None = None,
        *,
        first: Pair | None = None,
    ) -> tuple[Tensor, Pair]:
        assert self.attention_norm is not None
        assert self.ffn_norm is not None
        normed_BLD = self.attention_norm(x_BLD)
        attended_BLD, pair = self.attention(normed_BLD, context, cache_slot, first=first)
        x_BLD = x_BLD + self._kept(attended_BLD)
        return x_BLD + self._kept(self.feed_forward(self.ffn_norm(x_BLD))), pair


class LoopCoderDecoder(LoopDecoder):
    """A looped decoder whose carry holds the first step's keys and values."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoopDecoder.Config):
        """Layers are `LoopCoderBlock`s."""

        @property
        def whole_visits(self) -> bool:
            """As in the base class: a layer also hands keys on to later steps."""
            return False

        def set_layer_sharding(self, layer: LoopCoderBlock.Config, *, enable_sp: bool) -> None:
            """As in the base class; a gate goes with its head."""
            LoopDecoder.Config.set_layer_sharding(self, layer, enable_sp=enable_sp)
            assert isinstance(layer.attention, TwoReachAttention.Config)
            heads = dense_activation_placement(tp=spmd.S(2))
            states: dict[str, SpmdLayout] = {}
            states |= dict.fromkeys(("q_BLNH", "global_BLNH", "local_BLNH"), heads)
            layer.attention.mix.sharding_config = ShardingConfig(
                state_shardings=dict.fromkeys(
                    ("weight", "bias"), dense_param_placement(tp=spmd.S(0))
                ),
                in_src_shardings=states,
                in_dst_shardings=states,
                out_src_shardings=heads,
            )

        def own_flops(self, flops: Flops, recurrent_steps: float, reached: float) -> Flops:
            """As in the base class, with the gates and windows of all steps but the first."""
            assert self.window is not None
            later, backward = max(recurrent_steps - 1, 0), min(reached, recurrent_steps - 1)
            visits = len(self.layers) * (2 * later + 4 * max(backward, 0))
            queries = self.layers[0].attention.widths[0]
            keys = min(self.window, self.max_seq_len)
            return flops._replace(
                matrices=flops.matrices + visits * queries,
                attention=flops.attention + visits * 2 * queries * keys,
            )

    config: Config

    def start(self, tokens: Tensor, context: LoopContext) -> Passed:
        """As in the base class; step 1 reads no keys, so what stands for them has no size."""
        none_BL11 = torch.zeros(*tokens.shape, 1, 1, device=tokens.device)
        hidden_BLD = super().start(tokens, context)
        none_BL11 = none_BL11.to(hidden_BLD.dtype)
        return Passed(hidden_BLD, ((none_BL11, none_BL11),) * len(self.layers))

    def step(self, carry: Carry, step: int | Tensor, context: LoopContext) -> Any:
        hidden_BLD, first = carry.hidden_BLD, []
        told = step
        if isinstance(step, int) and context.cache is None and not self.tells_step:
            told = min(step, 2)  # compiled layers are of two kinds, whatever R is
        for index, pair in enumerate(carry.first):
            hidden_BLD, pair = self.layers[str(index)](
                hidden_BLD,
                context,
                CacheSlot(told, index),
                first=None if isinstance(step, int) and step == 1 else pair,
            )
            first.append(pair)
        if self.norm_placement == "every_step":
            hidden_BLD = self.norm(hidden_BLD)
        return Passed(hidden_BLD, tuple(first))

    def advance(
        self, carry: Carry, hidden_BLD: Any, step: int | Tensor, context: LoopContext
    ) -> Passed:
        """Return the state of the step, which is the next one's carry."""
        return hidden_BLD

    def read(
        self, hidden_BLD: Any, context: LoopContext, step: int | Tensor | None = None
    ) -> Tensor:
        return super().read(hidden_BLD.hidden_BLD, context, step)
