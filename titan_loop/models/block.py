"""One unique layer of attention and a gated feed-forward, with norms before or after each branch.

    before      x ← x + attention(n1(x)),       x ← x + feed_forward(n3(x))         Llama
    after       x ← x + n2(attention(x)),       x ← x + n4(feed_forward(x))         OLMo 2
    both        x ← x + n2(attention(n1(x))),   x ← x + n4(feed_forward(n3(x)))     Ouro, Gemma

Norms on branch outputs keep residual updates at unit scale, so the state grows at most linearly
with the number of visits.

Sources: Touvron et al. 2023 (Llama), arXiv 2302.13971, §2.2; OLMo team 2025 (OLMo 2), arXiv
2501.00656, §3; Zhu et al. 2025 (Ouro), arXiv 2510.25741, §4, order of the norms as in the released
checkpoints.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.module import Module

from titan_loop.models.attention import LoopAttention
from titan_loop.models.context import CacheSlot, LoopContext
from titan_loop.models.dropout import Dropout
from titan_loop.models.joined import Joinable, JoinableQKV, Joined, can_join


class GatedFeedForward(FeedForward):
    """W_2 (silu(W_1 x) ⊙ W_3 x); (B, L, D) in and out."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        """As in `FeedForward`."""

    def forward(self, x: Tensor, *, joined: Joined | None = None) -> Tensor:
        """Apply the three projections."""
        if joined is None:
            return self.w2(self.act(self.w1(x)) * self.w3(x))
        gate_BLF, up_BLF = F.linear(x, *joined.gate_up).chunk(2, dim=-1)
        return self.w2(self.act(gate_BLF) * up_BLF)

    def act(self, gate_BLF: Tensor) -> Tensor:
        """Return the activations of the gate."""
        return F.silu(gate_BLF)


class GELUGatedFeedForward(GatedFeedForward):
    """W_2 (gelu(W_1 x) ⊙ W_3 x), with the tanh form of GELU; (B, L, D) in and out."""

    @dataclass(kw_only=True, slots=True)
    class Config(GatedFeedForward.Config):
        """As in `FeedForward`."""

    def act(self, gate_BLF: Tensor) -> Tensor:
        return F.gelu(gate_BLF, approximate="tanh")


def built(config: Module.Config | None) -> Module | None:
    """Return the module of a config; None for None."""
    return None if config is None else config.build()


class DenseBlock(TransformerBlock):
    """A transformer block; (B, L, D) in and out."""

    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):
        """torchtitan's block with dropout and a factor, `branch_scale`, on both branches.

        A norm that is None is left out.
        """

        attention_norm: RMSNorm.Config | None  # type: ignore[assignment]
        ffn_norm: RMSNorm.Config | None  # type: ignore[assignment]
        attention_post_norm: RMSNorm.Config | None = None
        ffn_post_norm: RMSNorm.Config | None = None
        dropout: Dropout.Config | None = None
        branch_scale: float = 1.0

        @property
        def norms(self) -> list[RMSNorm.Config]:
            """All norms of the state and of branches in the layer."""
            before, after = self.attention_norm, self.attention_post_norm
            norms = (before, after, self.ffn_norm, self.ffn_post_norm)
            return [norm for norm in norms if norm is not None]

        @property
        def matrix_elements(self) -> int:
            """Number of weights that take part in matrix products."""
            assert self.feed_forward is not None
            up = self.feed_forward.w1
            return self.attention_elements + 3 * up.in_features * up.out_features

        @property
        def attention_elements(self) -> int:
            """Number of `matrix_elements` in attention."""
            assert isinstance(self.attention, LoopAttention.Config)
            dim, (queries, keys) = self.attention.dim, self.attention.widths
            gate = 0 if self.attention.gate is None else dim * queries
            scores = self.attention.distance_scores
            tables = 0 if scores is None else scores.matrix_elements
            return 2 * dim * (queries + keys) + gate + tables

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.feed_forward is not None
        # In this order: seeded initialisation follows the order of the parameters.
        self.attention_norm = built(config.attention_norm)
        self.attention = config.attention.build()
        self.attention_post_norm = built(config.attention_post_norm)
        self.ffn_norm = built(config.ffn_norm)
        self.feed_forward = config.feed_forward.build()
        self.ffn_post_norm = built(config.ffn_post_norm)
        self.dropout = None if config.dropout is None else config.dropout.build()
        self.branch_scale = config.branch_scale

    @property
    def can_join(self) -> bool:
        """Whether `forward` takes `joined` matrices; a subclass may multiply otherwise."""
        own = type(self) is DenseBlock and type(self.attention) is LoopAttention
        if not own or not isinstance(self.attention.qkv_linear, JoinableQKV):
            return False
        return all(map(can_join, self.joinable))

    @property
    def joinable(self) -> Joinable:
        """The matrices that `joined` ones replace."""
        qkv, ffn = self.attention.qkv_linear, self.feed_forward
        return [qkv.wq, qkv.wk, qkv.wv], [ffn.w1, ffn.w3]

    def forward(
        self,
        x_BLD: Tensor,
        context: LoopContext,
        cache_slot: CacheSlot | None = None,
        *,
        joined: Joined | None = None,
    ) -> Tensor:
        """Apply the layer once; `context`, `cache_slot`, `joined` as in `LoopAttention.forward`."""
        # Neither positional nor handed on where there is none: upstream's redistribution of inputs
        # wants every positional argument, and parts of other families have no such argument.
        more = {} if joined is None else {"joined": joined}
        normed_BLD = _normed(self.attention_norm, x_BLD)
        attended_BLD = self.attention(normed_BLD, context, cache_slot, **more)
        x_BLD = x_BLD + self._kept(_normed(self.attention_post_norm, attended_BLD))
        fed_BLD = self.feed_forward(_normed(self.ffn_norm, x_BLD), **more)
        return x_BLD + self._kept(_normed(self.ffn_post_norm, fed_BLD))

    def _kept(self, branch_BLD: Tensor) -> Tensor:
        if self.branch_scale != 1:
            branch_BLD = branch_BLD * self.branch_scale
        return branch_BLD if self.dropout is None else self.dropout(branch_BLD)


def _normed(norm: Module | None, x_BLD: Tensor) -> Tensor:
    return x_BLD if norm is None else norm(x_BLD)
