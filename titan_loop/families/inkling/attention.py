"""Inkling's attention: clipped queries and keys, a learned relative bias, a sink of every token.

    q = τ clip(c ⊙ W_q x_q),   k = clip(conv(W_k x_k)),   v = n(conv(W_v x_v)),   τ = log_scale
    s_ij = q_i · k_j / √H + r_i · P_{i−j},   r = τ clip(c' ⊙ W_r x_q),   P_δ = 0 from the extent on
    out = W_o (σ(W_g x_q) ⊙ Σ_j e^{s_ij} v_j / (e^{a_i} + Σ_j e^{s_ij})),   a = W_a x_q

τ is 1 in layers with a window, whose convolutions are static; the others' are dynamic.

Source: `inkling2_loop` in transformers 5.24.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module

from titan_loop.families.inkling.parts import (
    DynamicConvolution,
    ShortConvolution,
    clipped,
    log_scale,
    normed,
)
from titan_loop.models.attention import LoopAttention
from titan_loop.models.context import CacheSlot, LoopContext, WindowedMasks


class StreamQKV(QKVLinear):
    """Three projections, each of an input of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(QKVLinear.Config):
        """As in `QKVLinear`."""

    def forward(  # type: ignore[override]
        self, x: Tensor, key_BLD: Tensor, value_BLD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, (B, L, heads, H) each."""
        pairs = ((self.wq, x), (self.wk, key_BLD), (self.wv, value_BLD))
        q, k, v = (part(given).unflatten(-1, (-1, self.head_dim)) for part, given in pairs)
        return q, k, v


class HeadClip(Module):
    """clip(c ⊙ x) of every head, with learned scales c."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        heads: int
        width: int
        threshold: float

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(config.heads, config.width))
        self.threshold = config.threshold

    def forward(self, x_BLNH: Tensor) -> Tensor:
        """Return clipped heads in at least fp32."""
        dtype = torch.promote_types(x_BLNH.dtype, torch.float32)
        return clipped(x_BLNH.to(dtype) * self.scale.to(dtype), self.threshold)


class RelativeBias(Module):
    """The bias of a query at every distance, mixed from a bank of profiles."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        linear: Linear.Config
        clip: HeadClip.Config
        extent: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.linear, self.clip = config.linear.build(), config.clip.build()
        self.bank = nn.Parameter(torch.empty(config.clip.width, config.extent))

    def forward(self, x_BLD: Tensor, distance_BLS: Tensor, scale: Tensor | float) -> Tensor:
        """Return (B, N, L, S) terms of the scores."""
        heads, width = self.clip.scale.shape
        r_BLNW = (self.clip(self.linear(x_BLD).unflatten(-1, (heads, width))) * scale).to(x_BLD)
        by_distance_BNLX = (r_BLNW @ self.bank.to(r_BLNW.dtype)).transpose(1, 2)
        by_distance_BNLX = nn.functional.pad(by_distance_BNLX, (0, 1))  # nothing beyond the extent
        index_BLS = distance_BLS.clamp(max=self.bank.shape[1])
        shape = (*by_distance_BNLX.shape[:3], distance_BLS.shape[-1])
        return by_distance_BNLX.gather(-1, index_BLS.unsqueeze(1).expand(shape))


class InklingAttention(LoopAttention):
    """Attention whose query, key and value read inputs of their own."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoopAttention.Config):
        """`floor` and `alpha` scale queries of far positions; floor 0 scales none."""

        q_clip: HeadClip.Config
        k_conv: ShortConvolution.Config | DynamicConvolution.Config
        v_conv: ShortConvolution.Config | DynamicConvolution.Config
        bias: RelativeBias.Config
        sink: Linear.Config
        floor: int
        alpha: float
        norm_eps: float

        @classmethod
        def of(cls, one: LoopAttention.Config, **own: object) -> "InklingAttention.Config":
            """Return attention of the shape of `one`."""
            shape = {each.name: getattr(one, each.name) for each in fields(one)}
            return cls(**{**shape, **own})

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config
        self.q_clip, self.bias = config.q_clip.build(), config.bias.build()
        self.k_conv, self.v_conv = config.k_conv.build(), config.v_conv.build()
        self.sink = config.sink.build()

    def forward(  # type: ignore[override]
        self,
        x_BLD: Tensor,
        key_BLD: Tensor,
        value_BLD: Tensor,
        context: LoopContext,
        cache_slot: CacheSlot | None,
    ) -> Tensor:
        """Attend to normed inputs of the query, the key and the value; (B, L, D) in and out."""
        config, dtype = self.config, x_BLD.dtype
        q_BLNH, k_BLNH, v_BLNH = self.qkv_linear(x_BLD, key_BLD, value_BLD)
        far: Tensor | float = 1.0
        if config.floor:
            far = log_scale(context.positions_BL, config.floor, config.alpha)
        q_BLNH = (self.q_clip(q_BLNH).to(dtype) * far).to(dtype)
        k_BLC = self.k_conv(k_BLNH.flatten(2), key_BLD, context, cache_slot, 0)
        v_BLC = self.v_conv(v_BLNH.flatten(2), value_BLD, context, cache_slot, 1)
        k_BLNH = clipped(k_BLC.view_as(k_BLNH), config.q_clip.threshold).to(dtype)
        v_BLNH = normed(v_BLC.view_as(v_BLNH), config.norm_eps).to(dtype)
        if context.cache is not None:
            assert cache_slot is not None
            k_BLNH, v_BLNH = context.cache.update(cache_slot, k_BLNH, v_BLNH)
        assert context.shared_positions is not None
        scores_BNLS = self.bias(x_BLD, context.shared_positions, far)
        mask = context.attention_mask
        if isinstance(mask, WindowedMasks):
            mask = mask.whole if self.window is None else mask.window
        queries, keys = x_BLD.shape[1], k_BLNH.shape[1]
        if mask is None:
            mask = x_BLD.new_ones(1, 1, queries, keys, dtype=torch.bool).tril(keys - queries)
        assert isinstance(mask, Tensor)
        # The sink is one more key, of which the kernel knows the score alone.
        sink_BNL1 = self.sink(x_BLD).transpose(1, 2).unsqueeze(-1)
        scores_BNLS = torch.cat([scores_BNLS, sink_BNL1], dim=-1) / self.scaling
        seen = torch.cat([mask, torch.ones_like(mask[..., :1])], dim=-1)
        k_BLNH, v_BLNH = (nn.functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k_BLNH, v_BLNH))
        heads_BLNH = self.inner_attention(
            q_BLNH,
            k_BLNH,
            v_BLNH,
            attention_masks=seen,
            scale=self.scaling,
            enable_gqa=self.enable_gqa,
            scores_BNLS=scores_BNLS,
        )
        heads_BLC = heads_BLNH.contiguous().flatten(2)
        assert self.gate is not None
        return self.wo(self.gate(x_BLD).sigmoid() * heads_BLC)
