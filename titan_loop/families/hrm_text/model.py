"""HRM-Text: named sizes, options and initial weights; `decoder.py` has the equations.

Initial weights are the released code's: matrices truncated normal with standard deviation
1/√(inputs), the embedding with 1/s where it is scaled by s = √D, l_0 with 1.

Source: Wang et al. 2026 (HRM-Text), arXiv 2605.20613, and its released code, whose sizes B, L, XL,
XXL and XXL_wide are those below with a vocabulary of 65,536; `1b` is XL, the released model.
"""

from dataclasses import dataclass, field
from functools import partial

from torch import nn
from torchtitan.models.common.attention import QKVLinear, VarlenAttention
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm

from titan_loop.errors import UserError
from titan_loop.families.hrm_text.decoder import (
    GatedAttention,
    GatedBlock,
    HrmDecoder,
    LowStart,
)
from titan_loop.models.attention import inner_attention_config
from titan_loop.models.exit_gate import ExitGate
from titan_loop.models.family import Family, FamilyName, ModelOptions, ModelSize
from titan_loop.models.initialisation import normal_matrix
from titan_loop.models.positions import RotateHalf
from titan_loop.models.readout import LMHead

SIZES = {
    "debugmodel": ModelSize(64, 4, 4, 192, vocab_size=128, recurrent_steps=2),
    "b": ModelSize(1024, 12, 8, 2816, vocab_size=65_536, recurrent_steps=2),
    "l": ModelSize(1280, 24, 10, 3584, vocab_size=65_536, recurrent_steps=2),
    "1b": ModelSize(1536, 32, 12, 4096, vocab_size=65_536, recurrent_steps=2),
    "xxl": ModelSize(1792, 72, 14, 4864, vocab_size=65_536, recurrent_steps=2),
    "xxl-wide": ModelSize(2560, 32, 20, 6912, vocab_size=65_536, recurrent_steps=2),
}
ZERO = {"weight": nn.init.zeros_, "bias": nn.init.zeros_}


@dataclass(kw_only=True, slots=True)
class HrmTextOptions(ModelOptions):
    """Which HRM-Text to train; `recurrent_steps` are its high cycles, `n_layers` of both stacks."""

    family: FamilyName = field(default="hrm_text", init=False)

    exit_gate: bool = False
    """Whether there is an exit gate, which no engine's format can hold."""

    low_cycles: int = 3
    """Passes of the low stack in every high cycle."""

    prefix_lm: bool = True
    """Whether the tokens of a prompt see each other in both directions; the loader marks them
    (dataloader.prefix)."""

    embedding_scale: float | None = None
    """Factor on embeddings where they enter the state; None takes that of the weights a run starts
    from, √D for initial ones."""

    rope_theta: float | None = None
    """Base of the rotary embedding; None takes that of the weights a run starts from, 10,000 for
    initial ones."""

    norm_eps: float = 1e-6
    """Added to the mean square in every norm."""


def _check(options: HrmTextOptions, shape: ModelSize) -> None:
    if options.low_cycles < 1:
        raise UserError(f"model.low_cycles={options.low_cycles} must be at least 1")
    if shape.n_layers % 2:
        raise UserError(
            f"model.n_layers={shape.n_layers} must be even: half of them are the low stack"
        )
    if shape.n_kv_heads not in (None, shape.n_heads):
        raise UserError(
            f"model.n_kv_heads={shape.n_kv_heads} must be model.n_heads={shape.n_heads}: HRM-Text "
            "has a key head for every query head"
        )
    for name in ("embedding_scale", "rope_theta", "norm_eps"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"model.{name}={value} must be a number above 0")


def decoder_config(
    options: HrmTextOptions, shape: ModelSize, max_seq_len: int
) -> HrmDecoder.Config:
    """Return the architecture; arguments as of `Family.decoder_config`."""
    _check(options, shape)
    kernel = inner_attention_config(options.attention)
    if options.prefix_lm and isinstance(kernel, VarlenAttention.Config):
        raise UserError(
            "model.attention=varlen does not work with model.prefix_lm=True; use flex or sdpa"
        )
    dim, scale = shape.dim, options.embedding_scale or shape.dim**0.5

    def linear(in_features: int, out_features: int) -> Linear.Config:
        init = {"weight": partial(normal_matrix, std=in_features**-0.5)}
        return Linear.Config(in_features=in_features, out_features=out_features, param_init=init)

    def norm() -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=dim, eps=options.norm_eps, elementwise_affine=False)

    def layer() -> GatedBlock.Config:
        head_dim = dim // shape.n_heads
        return GatedBlock.Config(
            attention_norm=norm(),
            attention=GatedAttention.Config(
                n_heads=shape.n_heads,
                dim=dim,
                qkv_linear=QKVLinear.Config(
                    head_dim=head_dim, wq=linear(dim, dim), wkv=linear(dim, dim)
                ),
                wo=linear(dim, dim),
                gate=linear(dim, dim),
                inner_attention=inner_attention_config(options.attention),
                rope=RotateHalf.Config(
                    dim=head_dim, max_seq_len=max_seq_len, theta=options.rope_theta or 10_000.0
                ),
            ),
            ffn_norm=norm(),
            feed_forward=FeedForward.Config(
                w1=linear(dim, shape.hidden_dim),
                w2=linear(shape.hidden_dim, dim),
                w3=linear(dim, shape.hidden_dim),
            ),
        )

    matrix = {"weight": partial(normal_matrix, std=1 / scale)}
    head = LMHead.Config(
        in_features=dim, out_features=shape.vocab_size, param_init=linear(dim, 1).param_init
    )
    if options.readout_chunk_tokens is not None:
        head.chunk_tokens = options.readout_chunk_tokens
    return HrmDecoder.Config(
        dim=dim,
        vocab_size=shape.vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab_size, embedding_dim=dim, param_init=matrix
        ),
        low_start=LowStart.Config(dim=dim, param_init={"weight": partial(normal_matrix, std=1.0)}),
        layers=[layer() for _ in range(shape.n_layers)],
        low_cycles=options.low_cycles,
        embedding_scale=scale,
        prefix_lm=options.prefix_lm,
        norm=norm(),
        lm_head=head,
        enable_weight_tying=options.tie_weights,
        recurrent_steps=shape.recurrent_steps,
        exit_gate=ExitGate.Config(in_features=dim, param_init=ZERO) if options.exit_gate else None,
    )


HRM_TEXT = Family(
    name="hrm_text",
    options=HrmTextOptions,
    sizes=SIZES,
    decoder_config=decoder_config,
    uses=frozenset({"export", "generate", "held_out"}),
)
