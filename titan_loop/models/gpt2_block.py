"""GPT-2's block, and a decoder of such blocks.

    x ← x + attention(norm_1(x)) + b_1
    x ← x + W_2 gelu(W_1 norm_2(x) + b) + b_2

Every projection has a bias. The block, not the projection, adds b_1 and b_2, after tensor-parallel
ranks have summed a branch's output. In the projection, every rank would add them.

Source: Radford et al. 2019 (GPT-2), with GELU in its tanh form. Deviation: dropout acts on branch
outputs, not on embeddings and attention weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.common.decoder_sharding import (
    colwise_config,
    dense_activation_placement,
    norm_config,
    rowwise_config,
)
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import LayerNorm
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from titan_loop.models.attention import AttentionBackend, LoopAttention, inner_attention_config
from titan_loop.models.context import CacheSlot, LoopContext
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.dropout import Dropout, dropout_config
from titan_loop.models.family import ModelOptions, ModelSize
from titan_loop.models.initialisation import normal_matrix
from titan_loop.models.positions import RotateHalf
from titan_loop.models.readout import LMHead
from titan_loop.models.sharding import set_attention_sharding, state_placement

NORM_EPS = 1e-5
_GPT2_STD, _GPT2_DIM = 0.02, 768
ZERO = {"weight": nn.init.zeros_}
NORM_INIT = {"weight": nn.init.ones_, "bias": nn.init.zeros_}


class StateBias(Module):
    """Adds a bias to a branch's output, which has the placement of the state."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.dim))

    def forward(self, input: Tensor) -> Tensor:
        """Return (B, L, D)."""
        return input + self.weight


class GELUFeedForward(Module):
    """W_2 gelu(W_1 x + b); (B, L, D) in and out."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        w1: Linear.Config
        w2: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = config.w1.build()
        self.w2 = config.w2.build()

    def forward(self, x: Tensor) -> Tensor:
        """Apply both projections."""
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))


class FinalLayerNorm(LayerNorm):
    """LayerNorm that keeps its input's dtype when mixed precision holds its weights in fp32."""

    @dataclass(kw_only=True, slots=True)
    class Config(LayerNorm.Config):
        """As in `LayerNorm`."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (B, L, D) over D."""
        return super().forward(input.to(self.weight.dtype)).to(input.dtype)


class GPT2Block(Module):
    """One layer; (B, L, D) in and out."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        attention_norm: LayerNorm.Config
        attention: LoopAttention.Config
        attention_bias: StateBias.Config
        ffn_norm: LayerNorm.Config
        feed_forward: GELUFeedForward.Config
        ffn_bias: StateBias.Config
        dropout: Dropout.Config | None = None

        @property
        def matrix_elements(self) -> int:
            """As in `DenseBlock`."""
            dim, wide = self.attention.dim, self.feed_forward.w1.out_features
            return 2 * dim * sum(self.attention.widths) + 2 * dim * wide

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = config.attention_norm.build()
        self.attention = config.attention.build()
        self.attention_bias = config.attention_bias.build()
        self.ffn_norm = config.ffn_norm.build()
        self.feed_forward = config.feed_forward.build()
        self.ffn_bias = config.ffn_bias.build()
        self.dropout = None if config.dropout is None else config.dropout.build()

    def forward(
        self, x_BLD: Tensor, context: LoopContext, cache_slot: CacheSlot | None = None
    ) -> Tensor:
        """Apply the layer once; `context` and `cache_slot` as in `LoopAttention.forward`."""
        attended_BLD = self.attention(self.attention_norm(x_BLD), context, cache_slot)
        x_BLD = x_BLD + self._kept(self.attention_bias(attended_BLD))
        return x_BLD + self._kept(self.ffn_bias(self.feed_forward(self.ffn_norm(x_BLD))))

    def _kept(self, branch_BLD: Tensor) -> Tensor:
        return branch_BLD if self.dropout is None else self.dropout(branch_BLD)


class GPT2Decoder(LoopDecoder):
    """A looped decoder of GPT-2's blocks."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoopDecoder.Config):
        """As in `LoopDecoder`, with `GPT2Block` as layer."""

        def set_sharding(self, *, enable_sp: bool) -> None:
            """As in `LoopDecoder`; a norm's bias is placed like its gain."""
            LoopDecoder.Config.set_sharding(self, enable_sp=enable_sp)
            self.norm.sharding_config = layer_norm_sharding(enable_sp)

        def set_layer_sharding(self, layer: GPT2Block.Config, *, enable_sp: bool) -> None:
            """Shard heads and feed-forward width over the tensor-parallel ranks."""
            layer.attention_norm.sharding_config = layer_norm_sharding(enable_sp)
            layer.ffn_norm.sharding_config = layer_norm_sharding(enable_sp)
            layer.attention_bias.sharding_config = norm_config(enable_sp=enable_sp)
            layer.ffn_bias.sharding_config = norm_config(enable_sp=enable_sp)
            set_attention_sharding(layer.attention, enable_sp=enable_sp)
            layer.feed_forward.sharding_config = ShardingConfig(
                in_src_shardings={"x": state_placement(enable_sp)},
                in_dst_shardings={"x": dense_activation_placement(tp=spmd.R)},
            )
            layer.feed_forward.w1.sharding_config = colwise_config()
            layer.feed_forward.w2.sharding_config = rowwise_config(output_sp=enable_sp)


def layer_norm_sharding(enable_sp: bool) -> ShardingConfig:
    """Return a norm's placements, with the bias placed like the gain."""
    config = norm_config(enable_sp=enable_sp)
    config.state_shardings = {**config.state_shardings, "bias": config.state_shardings["weight"]}
    return config


def matrix_init(dim: int, scale: float = 1.0) -> dict[str, Callable]:
    """Return initialisers: GPT-2's std, 0.02 at width 768, times √(768/dim) and `scale`."""
    std = scale * _GPT2_STD * (_GPT2_DIM / dim) ** 0.5
    return {"weight": partial(normal_matrix, std=std), "bias": nn.init.zeros_}


def block_config(
    shape: ModelSize,
    kernel: AttentionBackend,
    rotation: RotateHalf.Config,
    output_init: dict[str, Callable],
    *,
    dropout: float = 0.0,
) -> GPT2Block.Config:
    """Return one layer's block; `output_init` initialises both output projections."""
    head_dim, matrix = shape.dim // shape.n_heads, matrix_init(shape.dim)

    def linear(in_features: int, out_features: int) -> Linear.Config:
        return Linear.Config(
            in_features=in_features, out_features=out_features, bias=True, param_init=matrix
        )

    def output(in_features: int) -> Linear.Config:
        return Linear.Config(
            in_features=in_features, out_features=shape.dim, param_init=output_init
        )

    def norm() -> LayerNorm.Config:
        return LayerNorm.Config(normalized_shape=shape.dim, eps=NORM_EPS, param_init=NORM_INIT)

    return GPT2Block.Config(
        attention_norm=norm(),
        attention=LoopAttention.Config(
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            dim=shape.dim,
            qkv_linear=QKVLinear.Config(
                head_dim=head_dim,
                wq=linear(shape.dim, shape.dim),
                wkv=linear(shape.dim, (shape.n_kv_heads or shape.n_heads) * head_dim),
            ),
            wo=output(shape.dim),
            inner_attention=inner_attention_config(kernel),
            rope=replace(rotation),  # a copy, since `set_sharding` writes to it
        ),
        attention_bias=StateBias.Config(dim=shape.dim, param_init=ZERO),
        ffn_norm=norm(),
        feed_forward=GELUFeedForward.Config(
            w1=linear(shape.dim, shape.hidden_dim), w2=output(shape.hidden_dim)
        ),
        ffn_bias=StateBias.Config(dim=shape.dim, param_init=ZERO),
        dropout=dropout_config(dropout),
    )


DecoderConfig = TypeVar("DecoderConfig", bound=GPT2Decoder.Config)


def gpt2_config(
    kind: type[DecoderConfig],
    options: ModelOptions,
    shape: ModelSize,
    *,
    table: dict[str, Callable],
    **own: Any,
) -> DecoderConfig:
    """Return the architecture of a decoder of such blocks, whose norm stands at the readout.

    Args:
        table: Initialisers of the embedding.
        own: Its layers, and the fields that `kind` adds or sets differently.
    """
    # A tied matrix is initialised twice, as embedding and as head: both must draw alike.
    head_init = table if options.tie_weights else matrix_init(shape.dim)
    head = LMHead.Config(in_features=shape.dim, out_features=shape.vocab_size, param_init=head_init)
    if options.readout_chunk_tokens is not None:
        head.chunk_tokens = options.readout_chunk_tokens
    return kind(
        dim=shape.dim,
        vocab_size=shape.vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab_size, embedding_dim=shape.dim, param_init=table
        ),
        norm_placement="readout",
        norm=FinalLayerNorm.Config(  # type: ignore[arg-type]  upstream names RMSNorm
            normalized_shape=shape.dim, eps=NORM_EPS, param_init=NORM_INIT
        ),
        lm_head=head,
        enable_weight_tying=options.tie_weights,
        recurrent_steps=shape.recurrent_steps,
        **own,
    )
