"""Multi-head and grouped-query attention for layers that are visited several times.

`LoopAttention` is torchtitan's `GQAttention`, with positions from the `LoopContext` and an optional
cache addressed by (recurrent step, layer). `DocumentAttention` is the kernel for devices without
FlexAttention.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias

import titan_loop.compat as compat  # before any torchtitan module
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.models.common import attention as titan_attention
from torchtitan.models.common.attention import FlexAttention, GQAttention, VarlenAttention
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.module import Module
from torchtitan.tools.utils import get_cuda_flash_attention_impl

from titan_loop.errors import UserError
from titan_loop.models.context import (
    CacheSlot,
    Entries,
    LoopContext,
    WindowedMasks,
    WindowShare,
)
from titan_loop.models.joined import Joined
from titan_loop.models.positions import DistanceScores, every_head

AttentionBackend: TypeAlias = Literal["auto", "sdpa", "flex", "varlen"]
_FLASH_PACKAGES = {"FA3": "flash_attn_interface", "FA4": "flash_attn"}
"""Version of FlashAttention that torchtitan chooses on Hopper, on Blackwell → Python package."""


def document_mask(
    positions_BL: Tensor,
    share: WindowShare | None = None,
    prefix_BL: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Return a (B, 1, queries, keys) bool mask, True where a query may attend to a key.

    Both must be in one document, and the key not later than the query nor `window` tokens or more
    before it, unless both are in the document's prefix (`prefix_BL`, bool). A document starts
    wherever `positions_BL`, of whole windows, is 0. `share` selects this rank's queries and orders
    the keys; None takes all.
    """
    share, query_document_BL, key_document_BL = _documents(positions_BL, share)
    same_document = query_document_BL.unsqueeze(2) == key_document_BL.unsqueeze(1)
    distance = share.queries_L.unsqueeze(1) - share.keys_L
    allowed = distance >= 0
    if window is not None:
        allowed = allowed & (distance < window)
    if prefix_BL is not None:
        query_BL, key_BL = (prefix_BL[:, index_L] for index_L in share)
        allowed = allowed | (query_BL.unsqueeze(2) & key_BL.unsqueeze(1))
    return (same_document & allowed).unsqueeze(1)


def document_block_mask(
    positions_BL: Tensor,
    share: WindowShare | None,
    block_size: int | tuple[int, int],
    prefix_BL: Tensor | None = None,
    window: int | None = None,
) -> BlockMask:
    """Return `document_mask` as a block mask for Flex; `block_size` is the kernel's."""
    (queries_L, keys_L), query_document_BL, key_document_BL = _documents(positions_BL, share)

    def allowed(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_document = query_document_BL[b, query] == key_document_BL[b, key]
        seen = queries_L[query] >= keys_L[key]
        if window is not None:
            seen = seen & (queries_L[query] - keys_L[key] < window)
        if prefix_BL is not None:
            seen = seen | (prefix_BL[b, queries_L[query]] & prefix_BL[b, keys_L[key]])
        return same_document & seen

    sizes = {"B": len(positions_BL), "Q_LEN": len(queries_L), "KV_LEN": len(keys_L)}
    return titan_attention.create_attention_mask(
        allowed, H=None, **sizes, device=positions_BL.device, BLOCK_SIZE=block_size
    )


def _documents(
    positions_BL: Tensor, share: WindowShare | None
) -> tuple[WindowShare, Tensor, Tensor]:
    if share is None:
        whole_L = torch.arange(positions_BL.shape[1], device=positions_BL.device)
        share = WindowShare(whole_L, whole_L)
    document_BL = (positions_BL == 0).cumsum(dim=1)
    return share, document_BL[:, share.queries_L], document_BL[:, share.keys_L]


class DocumentAttention(Module):
    """Scaled dot-product attention with an explicit boolean mask, for CPU and as the reference."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        scores_BNLS: Tensor | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        """Attend; returns (B, L, N, H).

        Args:
            k_BLNH: Rotated keys, (B, L_key, N_kv, H).
            attention_masks: (B, 1, L, L_key) bool. None is plain causal attention, if there
                are as many queries as keys, or if the last token is the only query.
            scores_BNLS: Terms added to the products of queries and keys, before scaling.
        """
        queries, keys = q_BLNH.shape[1], k_BLNH.shape[1]
        if attention_masks is None and queries not in (1, keys):
            raise ValueError(f"{queries} queries and {keys} keys need an explicit mask")
        if scores_BNLS is None and not softcap:
            # The compiler evaluates a branch, but keeps `queries > 1` symbolic once windows vary.
            is_causal = False if queries == 1 else attention_masks is None
            out_BNLH = F.scaled_dot_product_attention(
                q_BLNH.transpose(1, 2),
                k_BLNH.transpose(1, 2),
                v_BLNH.transpose(1, 2),
                attn_mask=attention_masks,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
            return out_BNLH.transpose(1, 2)
        if attention_masks is None:
            whole = q_BLNH.new_ones(queries, keys, dtype=torch.bool)
            attention_masks = whole.tril(keys - queries)
        factor = q_BLNH.shape[-1] ** -0.5 if scale is None else scale
        if softcap:
            assert scores_BNLS is None, "positions are rotations"
            return _capped(q_BLNH, k_BLNH, v_BLNH, attention_masks, factor, softcap)
        assert scores_BNLS is not None
        # torch's own kernel makes twice as many passes over a mask that needs a gradient.
        hidden = torch.zeros(attention_masks.shape, dtype=q_BLNH.dtype, device=q_BLNH.device)
        added_BNLS = scores_BNLS + hidden.masked_fill_(~attention_masks, -math.inf)
        k_BLNH, v_BLNH = (every_head(x, q_BLNH.shape[2]) for x in (k_BLNH, v_BLNH))
        q_MLH, k_MSH, v_MSH = (x.transpose(1, 2).flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))
        weights_MLS = torch.baddbmm(
            added_BNLS.flatten(0, 1), q_MLH, k_MSH.transpose(1, 2), beta=factor, alpha=factor
        ).softmax(dim=-1)
        return (weights_MLS @ v_MSH).unflatten(0, scores_BNLS.shape[:2]).transpose(1, 2)


def _capped(
    q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, mask: Tensor, factor: float, softcap: float
) -> Tensor:
    k_BLNH, v_BLNH = (every_head(x, q_BLNH.shape[2]) for x in (k_BLNH, v_BLNH))
    q_BNLH, k_BNSH, v_BNSH = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
    scores_BNLS = q_BNLH @ k_BNSH.transpose(2, 3) * factor
    scores_BNLS = softcap * torch.tanh(scores_BNLS / softcap)
    wide = torch.promote_types(q_BLNH.dtype, torch.float32)
    weights_BNLS = scores_BNLS.masked_fill(~mask, -math.inf).softmax(-1, dtype=wide)
    return (weights_BNLS.to(q_BLNH.dtype) @ v_BNSH).transpose(1, 2)


def attend_to_entries(
    q_BLNH: Tensor,
    keys: Entries,
    values: Entries,
    mask_B11S: Tensor | None,
    *,
    scale: float | None = None,
) -> Tensor:
    """Return `DocumentAttention` of one query a row; without a mask rows see all their entries."""
    batch, _, heads, head_dim = q_BLNH.shape
    scores_MT = torch.sparse.sampled_addmm(
        keys.seen_MT,
        q_BLNH.flatten(0, 2),
        keys.table_TH.t(),
        beta=0.0,
        alpha=head_dim**-0.5 if scale is None else scale,
    )
    scores_BN1S = scores_MT.values().view(batch, heads, 1, -1)
    if mask_B11S is not None:
        scores_BN1S = scores_BN1S.masked_fill(~mask_B11S, -math.inf)
    weights_MS = scores_BN1S.softmax(-1).flatten(0, 2)
    entry_MS = values.seen_MT.col_indices().view_as(weights_MS)
    out_MH = F.embedding_bag(entry_MS, values.table_TH, per_sample_weights=weights_MS, mode="sum")
    return out_MH.view_as(q_BLNH)


def inner_attention_config(backend: AttentionBackend, *, scores: bool = False) -> Module.Config:
    """Return the config of the attention kernel called `backend`.

    "auto" is Flex on CUDA, and SDPA elsewhere or with `scores`, terms that positions add to the
    products of queries and keys: only SDPA's module takes them. Flex and varlen are torchtitan's
    modules. Their masks and Flex's wiring are tested on CPU with the uncompiled kernel. Flex last
    trained on a GPU on 2026-11-26 (H200, bf16, torch 2.11); varlen has not run on one yet.
    """
    on_cuda = compat.device_type() == "cuda"
    if backend == "auto":
        backend = "flex" if on_cuda and not scores else "sdpa"
    if backend != "sdpa" and not on_cuda:
        problem = f"model.attention={backend} needs CUDA, which this machine lacks"
        raise UserError(f"{problem}; use sdpa or auto")
    flash = get_cuda_flash_attention_impl() if backend == "varlen" else None
    if flash is not None and find_spec(_FLASH_PACKAGES[flash]) is None:
        problem = f"model.attention=varlen needs {flash} on this GPU: {_FLASH_PACKAGES[flash]}"
        raise UserError(f"{problem} is not installed; install it, or use flex or auto")
    kernels = {"flex": FlexAttention, "varlen": VarlenAttention, "sdpa": DocumentAttention}
    return kernels[backend].Config()


class LoopAttention(GQAttention):
    """Grouped-query attention that reads rotations, mask and cache from the shared `LoopContext`.

    Without a gate the output is W_o heads, with one it is W_o (σ(W_g x) ⊙ heads).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        """With `keys_start_as_queries` the initial key matrix is a copy of the query matrix.

        Attributes:
            q_norm: Norm of the queries before they are rotated, of each head or of all at once.
            scale: Factor on scores in place of 1/√H.
        """

        distance_scores: DistanceScores.Config | None = None
        keys_start_as_queries: bool = False
        gate: Linear.Config | None = None
        q_norm: RMSNorm.Config | None = None
        k_norm: RMSNorm.Config | None = None
        scale: float | None = None
        softcap: float = 0.0
        window: int | None = None

        @property
        def widths(self) -> tuple[int, int]:
            """Widths of the queries and of the keys, N·H and K·H."""
            head_dim = self.head_dim or self.dim // self.n_heads
            return self.n_heads * head_dim, (self.n_kv_heads or self.n_heads) * head_dim

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        scores = config.distance_scores
        self.distance_scores = (
            None if scores is None else replace(scores, scale=config.scale).build()
        )
        self.keys_start_as_queries = config.keys_start_as_queries
        self.gate = None if config.gate is None else config.gate.build()
        if config.q_norm is not None and config.k_norm is not None:
            self.q_norm, self.k_norm = config.q_norm.build(), config.k_norm.build()
        if config.scale is not None:
            self.scaling = config.scale
        self.window = config.window
        self.added: dict[str, Any] = {}
        if cap := config.softcap:
            on_scores = isinstance(config.inner_attention, FlexAttention.Config)
            self.added = {"score_mod": partial(_cap, cap)} if on_scores else {"softcap": cap}

    @property
    def reads_entries(self) -> bool:
        """Whether a cache may return `Entries`."""
        return self.distance_scores is None and self.window is None and not self.added

    def _init_self_parameters(self) -> None:  # the projections initialise their own
        super()._init_self_parameters()
        if self.keys_start_as_queries:
            with torch.no_grad():
                self.qkv_linear.wk.weight.copy_(self.qkv_linear.wq.weight)

    def forward(  # type: ignore[override]
        self,
        x_BLD: Tensor,
        context: LoopContext,
        cache_slot: CacheSlot | None = None,
        *,
        joined: Joined | None = None,
    ) -> Tensor:
        """Attend to a normed input and project back; (B, L, D) in and out.

        `cache_slot` addresses this visit's keys and values; it is not read without a cache.
        `joined` keeps the layer's joined matrices between the visits of one pass.
        """
        q_BLNH, k_BLNH, v_BLNH = self._projected(x_BLD, context, cache_slot, joined)
        added = self.added
        if self.distance_scores is not None:
            scores_BNLS = self.distance_scores(q_BLNH, k_BLNH, context.shared_positions)
            added = {**added, "scores_BNLS": scores_BNLS}
        mask = context.attention_mask
        if isinstance(mask, WindowedMasks):
            mask = mask.whole if self.window is None else mask.window
        more = {"scale": self.scaling, "enable_gqa": self.enable_gqa, **added}
        if isinstance(k_BLNH, Entries):
            assert mask is None or isinstance(mask, Tensor)
            out_BLNH = attend_to_entries(q_BLNH, k_BLNH, v_BLNH, mask, scale=self.scaling)
        else:
            out_BLNH = self.inner_attention(q_BLNH, k_BLNH, v_BLNH, attention_masks=mask, **more)
        out_BLD = out_BLNH.contiguous().flatten(2)
        if self.gate is not None:
            out_BLD = self.gate(x_BLD).sigmoid() * out_BLD
        return self.wo(out_BLD)

    def _projected(
        self,
        x_BLD: Tensor,
        context: LoopContext,
        cache_slot: CacheSlot | None,
        joined: Joined | None = None,
    ) -> tuple[Tensor, Any, Any]:
        qkv = self.qkv_linear
        if joined is None:
            q_BLNH, k_BLNH, v_BLNH = qkv(x_BLD)
        elif self.q_norm is None and context.cache is None and not qkv._forward_hooks:
            # Queries and keys turn together.
            heads_BLNH = qkv.heads(x_BLD, joined)
            turned_BLNH, v_BLNH = heads_BLNH.split([qkv.queries + qkv.keys, qkv.keys], dim=2)
            turned_BLNH = self.rope.rotated(turned_BLNH, context.shared_positions)
            return *turned_BLNH.split([qkv.queries, qkv.keys], dim=2), v_BLNH
        else:
            q_BLNH, k_BLNH, v_BLNH = qkv(x_BLD, joined=joined)
        if self.q_norm is not None and self.k_norm is not None:
            q_BLNH, k_BLNH = self.q_norm(q_BLNH), self.k_norm(k_BLNH)
        q_BLNH, k_BLNH = self.rope(q_BLNH, k_BLNH, rope_BLH=context.shared_positions)
        if context.cache is not None:
            assert cache_slot is not None
            k_BLNH, v_BLNH = context.cache.update(cache_slot, k_BLNH, v_BLNH)
        return q_BLNH, k_BLNH, v_BLNH


def _cap(cap: float, score: Tensor, *_: Tensor) -> Tensor:
    """Return c·tanh(s/c), as Flex wants it for every scaled score."""
    return cap * torch.tanh(score / cap)
