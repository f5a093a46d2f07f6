"""Small parts of Inkling's layers: clips, short convolutions, attention over blocks, messages.

    clip(x; t) = x · min(1, t / |x|)                    of every head
    conv(x)_i  = (x_i + Σ_d w_d x_{i−d}) / √(K + 1)     d = 0 … K − 1, within the document
    dynamic    = (x_i + Σ_d (w_d + u_i,d) x_{i−d}) / √(2K + 1),   u_i = W y_i, shared by a head
    over(q; B) = Σ_b softmax_b(q · n(b) / √D) n(b)      n an RMSNorm without a gain
    gate(h, m) = (1 − tanh F z) h + tanh(G z) m,        z = W [n(h), n(m)]

All of them compute in at least fp32.

Source: `inkling2_loop` in transformers 5.24.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.protocols.module import Module

from titan_loop.models.context import CacheSlot, LoopContext
from titan_loop.models.parameter_groups import LookUp

BLOCK_EPS = 1e-6
"""In the norm of blocks; the others have `model.norm_eps`."""
_CLIP_EPS = 1e-6


def wide(x: Tensor) -> Tensor:
    """Return a tensor in at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def normed(x: Tensor, eps: float) -> Tensor:
    """Return x over its root mean square, in at least fp32."""
    return F.rms_norm(wide(x), x.shape[-1:], eps=eps)


def clipped(x: Tensor, threshold: float) -> Tensor:
    """Return vectors of at most that length, in at least fp32."""
    x = wide(x)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (threshold / (length + _CLIP_EPS)).clamp(max=1.0)


def log_scale(positions_BL: Tensor, floor: int, alpha: float) -> Tensor:
    """Return 1 + α log(max((p + 1) / floor, 1)) of every position, (B or 1, L, 1, 1)."""
    ratio_BL = ((positions_BL + 1).float() / floor).clamp(min=1.0)
    return (1.0 + alpha * ratio_BL.log())[..., None, None]


def earlier(
    x_BLC: Tensor, taps: int, context: LoopContext, slot: CacheSlot | None, part: int
) -> list[Tensor]:
    """Return x of the token itself, of the one before it, …: `taps` tensors (B, L, C).

    They are zero before the token's document. `part` numbers the convolutions of a layer.
    """
    length = x_BLC.shape[1]
    if context.cache is None:
        before_BLC = F.pad(x_BLC, (0, 0, taps - 1, 0))
    else:
        assert slot is not None
        before_BLC = context.cache.latest(slot, part, x_BLC)
    shifted = [before_BLC[:, taps - 1 - d : taps - 1 - d + length] for d in range(taps)]
    positions_BL1 = context.positions_BL.unsqueeze(-1)
    return [each.where(positions_BL1 >= d, 0.0) for d, each in enumerate(shifted)]


class ShortConvolution(Module):
    """A causal convolution of every channel by itself, plus its input; (B, L, C) in and out."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        channels: int
        taps: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.channels, 1, config.taps))
        self.taps = config.taps

    def forward(
        self,
        x_BLC: Tensor,
        input_BLD: Tensor | None,
        context: LoopContext,
        slot: CacheSlot | None,
        part: int,
    ) -> Tensor:
        """Convolve; `input_BLD` is for the dynamic one."""
        weight_KC = wide(self.weight)[:, 0].T.flip(0)
        x_BLC_wide = wide(x_BLC)
        window = earlier(x_BLC_wide, self.taps, context, slot, part)
        total_BLC = x_BLC_wide + sum(x * w for x, w in zip(window, weight_KC, strict=True))
        return (total_BLC / math.sqrt(self.taps + 1)).to(x_BLC.dtype)


class DynamicConvolution(Module):
    """A convolution whose weights also depend on the token, alike for a head's channels."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        channels: int
        taps: int
        heads: int
        dim: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.static_w = nn.Parameter(torch.empty(config.taps, config.channels))
        self.weight_proj = nn.Parameter(torch.empty(config.heads * config.taps, config.dim))
        self.taps, self.heads = config.taps, config.heads

    def forward(
        self,
        x_BLC: Tensor,
        input_BLD: Tensor,
        context: LoopContext,
        slot: CacheSlot | None,
        part: int,
    ) -> Tensor:
        """Convolve; the token's weights are read from `input_BLD`."""
        own_BLNK = wide(input_BLD @ self.weight_proj.T).unflatten(-1, (self.heads, self.taps))
        x_BLC_wide = wide(x_BLC)
        window = earlier(x_BLC_wide, self.taps, context, slot, part)
        total_BLC, width = x_BLC_wide, x_BLC.shape[-1] // self.heads
        for d, x in enumerate(window):
            own_BLC = own_BLNK[..., d].repeat_interleave(width, dim=-1)
            total_BLC = total_BLC + x * (wide(self.static_w[d]) + own_BLC)
        return (total_BLC / math.sqrt(2 * self.taps + 1)).to(x_BLC.dtype)


def over_blocks(query_QD: Tensor, blocks: Sequence[Tensor]) -> Tensor:
    """Return what each query reads of blocks (B, L, D): (B, L, Q, D), in at least fp32."""
    normed_BLKD = normed(torch.stack([*blocks], dim=2), BLOCK_EPS)
    scores_BLQK = wide(query_QD) @ normed_BLKD.transpose(2, 3) * query_QD.shape[-1] ** -0.5
    return scores_BLQK.softmax(-1) @ normed_BLKD


class BlockAttention(LookUp, Module):
    """Learned queries that read blocks in place of a residual stream."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        queries: int = 1

    def __init__(self, config: Config) -> None:
        super().__init__()
        shape = (config.dim,) if config.queries == 1 else (config.queries, config.dim)
        self.query = nn.Parameter(torch.empty(shape))

    def forward(self, *blocks: Tensor) -> tuple[Tensor, ...]:
        """Return (B, L, D) for each query."""
        query_QD = self.query.view(-1, self.query.shape[-1])
        return over_blocks(query_QD, blocks).to(blocks[0].dtype).unbind(2)


class MessageQueries(LookUp, Module):
    """Queries of the four messages to every looped layer: to q, k, v and the feed-forward."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        layers: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.empty(2 * config.layers, config.dim))
        self.kv_queries = nn.Parameter(torch.empty(2 * config.layers, config.dim))

    def forward(self, layer: int, blocks: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the messages to a looped layer, counted from 0, (B, L, D) each."""
        both, kv = (each[2 * layer : 2 * layer + 2] for each in (self.queries, self.kv_queries))
        query_QD = torch.cat([both[:1], kv, both[1:]])
        return over_blocks(query_QD, blocks).to(blocks[0].dtype).unbind(2)


class MessageGate(Module):
    """Mixes a message into a state, by gates of a low rank that read both."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        rank: int
        eps: float

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.down_weight = nn.Parameter(torch.empty(config.rank, 2 * config.dim))
        self.forget_weight = nn.Parameter(torch.empty(config.dim, config.rank))
        self.gain_weight = nn.Parameter(torch.empty(config.dim, config.rank))
        self.eps = config.eps

    def forward(self, hidden_BLD: Tensor, message_BLD: Tensor) -> Tensor:
        """Return the mixed state, (B, L, D)."""
        both = torch.cat([normed(hidden_BLD, self.eps), normed(message_BLD, self.eps)], dim=-1)
        low_BLM = wide(both.to(self.down_weight.dtype) @ self.down_weight.T)
        forget_BLD = torch.tanh(low_BLM @ wide(self.forget_weight).T)
        gain_BLD = torch.tanh(low_BLM @ wide(self.gain_weight).T)
        mixed_BLD = (1 - forget_BLD) * hidden_BLD + gain_BLD * message_BLD
        return mixed_BLD.to(hidden_BLD.dtype)
