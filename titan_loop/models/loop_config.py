"""Builds the architecture of the generic looped decoder from its options.

Initialisation (Ouro's paper does not publish its own):
- Matrices: truncated normal, standard deviation `initializer_range`, 0.02 as in the released
  config. Small widths may learn faster with about 1/sqrt(D). With `initial_keys=queries`, W_Q W_Kᵀ
  is close to a multiple of the identity, as in trained models ("Mimetic Initialization of
  Self-Attention Layers", Trockman and Kolter 2023, arXiv 2305.09828).
- Embedding: standard deviation 1, so that h_0 has the scale that the final norm gives every later
  h_r. A tied embedding is also the head and starts as a matrix. (Quick start after 120K tokens:
  2.90 against 3.37 bits per byte of code.)
- Norms: ones, but 1/sqrt(2·layers) on branch outputs. That is GPT-2's residual scaling (Radford et
  al. 2019, §2.3), in the gain because a norm undoes any scaling of the matrix before it. Without it
  the gradient grows 78-fold from R = 1 to R = 8 at 24 layers of width 128. `residual_scale=visits`
  counts every visit of a layer: 1/sqrt(2·layers·R).
- `branch_scale` is a factor in every forward pass, not in the initial weights: visits of one layer
  are correlated and add up like R, different layers add up like √L (arXiv 2606.18524).
- `base_width` is µP for hidden matrices and head (Yang et al. 2022, arXiv 2203.03466, Table 8); our
  initial logits have the same scale at every width, theirs shrink with it.
- Gate: zeros, so that λ = 1/2 at first.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.module import Module

from titan_loop.errors import UserError
from titan_loop.models.attention import DocumentAttention, LoopAttention, inner_attention_config
from titan_loop.models.block import DenseBlock, GatedFeedForward
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.dropout import dropout_config
from titan_loop.models.exit_gate import ExitGate
from titan_loop.models.family import ModelSize
from titan_loop.models.final_norm import FinalNorm
from titan_loop.models.initialisation import normal_matrix
from titan_loop.models.injection import AdditiveInjection, DiagonalInjection
from titan_loop.models.joined import JoinableQKV
from titan_loop.models.loop_options import ROPE_THETA, LoopOptions
from titan_loop.models.positions import (
    SCORES,
    LearnedPositions,
    NoRotation,
    Positions,
    PositionTable,
    RelativePositions,
    RotaryPositions,
    RotateHalf,
)
from titan_loop.models.readout import LMHead

DecoderConfig = TypeVar("DecoderConfig", bound=LoopDecoder.Config)

NORM_EPS = 1e-6
_EMBEDDING = {"weight": partial(normal_matrix, std=1.0)}
_NORM = {"weight": nn.init.ones_}
_GATE = {"weight": nn.init.zeros_, "bias": nn.init.zeros_}


def _matrix(options: LoopOptions, shape: ModelSize) -> dict[str, Callable]:
    if options.base_width and options.tie_weights:
        problem = "does not fit model.tie_weights=True: with the width, a head scales, a table not"
        raise UserError(f"model.base_width={options.base_width} {problem}; leave one of them out")
    std = options.initializer_range / math.sqrt(width_ratio(options, shape))
    return {"weight": partial(normal_matrix, std=std)}


def width_ratio(options: LoopOptions, shape: ModelSize) -> float:
    """Return the width over the base width; 1 without one."""
    return shape.dim / options.base_width if options.base_width else 1.0


def _positions(options: LoopOptions, shape: ModelSize) -> Positions.Config:
    kind = options.positions
    needs = {"learned": "learned_positions", **dict.fromkeys(SCORES, "relative_window")}.get(kind)
    for name in ("learned_positions", "relative_window"):
        value = getattr(options, name)
        if name == needs and value is None:
            raise UserError(f"model.positions={kind} needs model.{name}")
        if name != needs and value is not None:
            given = f"model.{name}={value}"
            raise UserError(f"{given} has no effect with model.positions={kind}; leave it out")
    if kind != "rope" and options.rope_theta != ROPE_THETA:
        given = f"model.rope_theta={options.rope_theta:g}"
        raise UserError(f"{given} has no effect with model.positions={kind}; leave it out")
    if kind == "learned":
        assert options.learned_positions is not None
        table = PositionTable.Config(
            num_embeddings=options.learned_positions,
            embedding_dim=shape.dim,
            param_init=_matrix(options, shape),
        )
        return LearnedPositions.Config(table=table)
    if kind in SCORES:
        assert options.relative_window is not None
        if not isinstance(_kernel(options), DocumentAttention.Config):
            raise UserError(f"model.positions={kind} needs model.attention=sdpa or auto")
        return RelativePositions.Config(kind=kind, window=options.relative_window)
    return RotaryPositions.Config() if kind == "rope" else Positions.Config()


def _kernel(options: LoopOptions) -> Module.Config:
    return inner_attention_config(options.attention, scores=options.positions in SCORES)


def _injection(options: LoopOptions, shape: ModelSize) -> AdditiveInjection.Config | None:
    if options.injection == "diagonal":
        return DiagonalInjection.Config(dim=shape.dim, param_init={"weight": nn.init.zeros_})
    return AdditiveInjection.Config() if options.injection == "additive" else None


def residual_gain(options: LoopOptions, shape: ModelSize) -> float:
    """Return the initial factor on a layer's branches that `residual_scale` asks for."""
    if options.residual_scale == "none":
        return 1.0
    depth = shape.n_layers
    if options.residual_scale == "visits":
        looped = shape.n_layers - options.prelude_layers - options.coda_layers
        depth += looped * (shape.recurrent_steps - 1)
    return (2 * depth) ** -0.5


def loop_config(
    kind: type[DecoderConfig], options: LoopOptions, shape: ModelSize, max_seq_len: int, **own: Any
) -> DecoderConfig:
    """Return the architecture of a looped decoder.

    `own` has the fields that `kind` adds to the generic decoder's, or sets differently. Raises
    `UserError` for an unknown choice, or options that do not fit together.
    """
    outside = options.prelude_layers, options.coda_layers
    if sum(outside) >= shape.n_layers:
        raise UserError(
            f"model.prelude_layers={outside[0]} and model.coda_layers={outside[1]} leave none of "
            f"model.n_layers={shape.n_layers} to loop; use fewer"
        )
    theta, positions = options.rope_theta, _positions(options, shape)
    assert theta is not None, "options are resolved"
    positions.check_window(max_seq_len)
    rotation = RotateHalf if isinstance(positions, RotaryPositions.Config) else NoRotation
    keys_start_as_queries = options.initial_keys == "queries"
    if keys_start_as_queries and shape.n_kv_heads not in (None, shape.n_heads):
        heads = f"model.n_kv_heads={shape.n_kv_heads}, model.n_heads={shape.n_heads}"
        problem = "model.initial_keys=queries needs as many key heads as query heads"
        raise UserError(f"{problem}: {heads}")
    matrix = _matrix(options, shape)
    branch_gain = {"weight": partial(nn.init.constant_, val=residual_gain(options, shape))}

    def linear(in_features: int, out_features: int) -> Linear.Config:
        return Linear.Config(in_features=in_features, out_features=out_features, param_init=matrix)

    def norm(gain: dict[str, Callable] = _NORM) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=shape.dim, eps=NORM_EPS, param_init=gain)

    def layer() -> DenseBlock.Config:
        own_width = getattr(options, "head_dim", None)  # of the families that have this option
        head_dim = own_width or shape.dim // shape.n_heads
        attention = LoopAttention.Config(
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            dim=shape.dim,
            head_dim=own_width,
            qkv_linear=JoinableQKV.Config(
                head_dim=head_dim,
                wq=linear(shape.dim, shape.n_heads * head_dim),
                wkv=linear(shape.dim, (shape.n_kv_heads or shape.n_heads) * head_dim),
            ),
            wo=linear(shape.n_heads * head_dim, shape.dim),
            inner_attention=_kernel(options),
            rope=rotation.Config(dim=head_dim, max_seq_len=max_seq_len, theta=theta),
            keys_start_as_queries=keys_start_as_queries,
            distance_scores=positions.scores(head_dim, shape.n_heads, matrix),
        )
        return DenseBlock.Config(
            attention_norm=norm(),
            attention=attention,
            attention_post_norm=norm(branch_gain),
            ffn_norm=norm(),
            feed_forward=GatedFeedForward.Config(
                w1=linear(shape.dim, shape.hidden_dim),
                w2=linear(shape.hidden_dim, shape.dim),
                w3=linear(shape.dim, shape.hidden_dim),
            ),
            ffn_post_norm=norm(branch_gain),
            dropout=dropout_config(options.dropout),
        )

    head = LMHead.Config(in_features=shape.dim, out_features=shape.vocab_size, param_init=matrix)
    if options.readout_chunk_tokens is not None:
        head.chunk_tokens = options.readout_chunk_tokens
    layers = [layer() for _ in range(shape.n_layers)]
    for each in layers[outside[0] : shape.n_layers - outside[1]]:
        each.branch_scale = options.branch_factor()
    generic: dict[str, Any] = {
        "dim": shape.dim,
        "vocab_size": shape.vocab_size,
        "tok_embeddings": Embedding.Config(
            num_embeddings=shape.vocab_size,
            embedding_dim=shape.dim,
            param_init=matrix if options.tie_weights else _EMBEDDING,
        ),
        "layers": layers,
        "norm_placement": options.norm_placement,
        "scale_embeddings": options.scale_embeddings,
        "embedding_dropout": dropout_config(options.embedding_dropout),
        "positions": positions,
        "injection": _injection(options, shape),
        "prelude_layers": options.prelude_layers,
        "coda_layers": options.coda_layers,
        "norm": FinalNorm.Config(normalized_shape=shape.dim, eps=NORM_EPS, param_init=_NORM),
        "lm_head": head,
        "enable_weight_tying": options.tie_weights,
        "recurrent_steps": shape.recurrent_steps,
        "width_ratio": width_ratio(options, shape),
        "exit_gate": (
            ExitGate.Config(in_features=shape.dim, param_init=_GATE) if options.exit_gate else None
        ),
    }
    return kind(**{**generic, **own})
