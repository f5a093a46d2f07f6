"""One unique layer of attention and SwiGLU: Llama's, or with sandwich normalisation as in Ouro.

    pre-norm    x ← x + attention(n1(x)),       x ← x + feed_forward(n3(x))
    sandwich    x ← x + n2(attention(n1(x))),   x ← x + n4(feed_forward(n3(x)))

The norms on branch outputs keep residual updates at unit scale, so the state grows at most linearly
with the number of visits.

Sources: Touvron et al. 2023 (Llama), arXiv 2302.13971, §2.2; Zhu et al. 2025 (Ouro), arXiv
2510.25741, §4, order of the norms as in the released checkpoints.
"""

from dataclasses import dataclass

from torch import Tensor
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.common.nn_modules import RMSNorm

from titan_loop.models.attention import LoopAttention
from titan_loop.models.context import CacheSlot, LoopContext
from titan_loop.models.dropout import Dropout


class PreNormBlock(TransformerBlock):
    """A transformer block with a norm before each branch; (B, L, D) in and out."""

    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):
        """torchtitan's block with dropout and a factor, `branch_scale`, on both branches."""

        dropout: Dropout.Config | None = None
        branch_scale: float = 1.0

        @property
        def norms(self) -> list[RMSNorm.Config]:
            """All norms of the layer."""
            return [self.attention_norm, self.ffn_norm]

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
            return 2 * dim * (queries + keys) + gate

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.feed_forward is not None
        self.attention_norm = config.attention_norm.build()
        self.attention = config.attention.build()
        self.ffn_norm = config.ffn_norm.build()
        self.feed_forward = config.feed_forward.build()
        self.dropout = None if config.dropout is None else config.dropout.build()
        self.branch_scale = config.branch_scale

    def forward(
        self, x_BLD: Tensor, context: LoopContext, cache_slot: CacheSlot | None = None
    ) -> Tensor:
        """Apply the layer once; `context` and `cache_slot` as in `LoopAttention.forward`."""
        x_BLD = x_BLD + self._kept(self.attention(self.attention_norm(x_BLD), context, cache_slot))
        return x_BLD + self._kept(self.feed_forward(self.ffn_norm(x_BLD)))

    def _kept(self, branch_BLD: Tensor) -> Tensor:
        if self.branch_scale != 1:
            branch_BLD = branch_BLD * self.branch_scale
        return branch_BLD if self.dropout is None else self.dropout(branch_BLD)


class SandwichBlock(PreNormBlock):
    """A transformer block with a norm before and after each branch; (B, L, D) in and out."""

    @dataclass(kw_only=True, slots=True)
    class Config(PreNormBlock.Config):
        attention_post_norm: RMSNorm.Config
        ffn_post_norm: RMSNorm.Config

        @property
        def norms(self) -> list[RMSNorm.Config]:
            """All norms of the layer."""
            before = PreNormBlock.Config.norms.fget(self)  # type: ignore[attr-defined]
            return [*before, self.attention_post_norm, self.ffn_post_norm]

    def __init__(self, config: Config) -> None:
        # Not PreNormBlock.__init__: seeded initialisation follows the order of the parameters.
        TransformerBlock.__init__(self)
        assert config.feed_forward is not None
        self.attention_norm = config.attention_norm.build()
        self.attention = config.attention.build()
        self.attention_post_norm = config.attention_post_norm.build()
        self.ffn_norm = config.ffn_norm.build()
        self.feed_forward = config.feed_forward.build()
        self.ffn_post_norm = config.ffn_post_norm.build()
        self.dropout = None if config.dropout is None else config.dropout.build()
        self.branch_scale = config.branch_scale

    def forward(
        self, x_BLD: Tensor, context: LoopContext, cache_slot: CacheSlot | None = None
    ) -> Tensor:
        """Apply the layer once; `context` and `cache_slot` as in `LoopAttention.forward`."""
        attended_BLD = self.attention(self.attention_norm(x_BLD), context, cache_slot)
        x_BLD = x_BLD + self._kept(self.attention_post_norm(attended_BLD))
        return x_BLD + self._kept(self.ffn_post_norm(self.feed_forward(self.ffn_norm(x_BLD))))
