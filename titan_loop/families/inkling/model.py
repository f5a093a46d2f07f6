"""Inkling: options, named sizes and initial weights; `decoder.py` has the equations.

Initial weights are the ones of transformers: matrices, banks and convolutions from a normal
distribution (ours truncated), queries and dynamic convolutions' static weights zero, scales one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from annotated_types import Ge, Gt
from torch import nn
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from titan_loop.bounds import FINITE
from titan_loop.errors import Refusal, UserError, raise_first
from titan_loop.families.inkling.attention import (
    HeadClip,
    InklingAttention,
    RelativeBias,
    StreamQKV,
)
from titan_loop.families.inkling.decoder import InklingBlock, InklingDecoder
from titan_loop.families.inkling.mixture import Mixture, RouterGate, SoftcappedExperts
from titan_loop.families.inkling.parts import (
    BlockAttention,
    DynamicConvolution,
    MessageGate,
    MessageQueries,
    ShortConvolution,
)
from titan_loop.models.family import (
    RUNTIME_OPTIONS,
    Family,
    FamilyName,
    ModelOptions,
    ModelSize,
)
from titan_loop.models.final_norm import FinalNorm
from titan_loop.models.initialisation import normal_matrix
from titan_loop.models.loop_config import loop_config
from titan_loop.models.loop_options import PLAIN_LOOP, ROPE_THETA, LoopOptions

SIZES = {
    "debugmodel": ModelSize(64, 6, 4, 32, vocab_size=128, recurrent_steps=3, n_kv_heads=2),
    # Inkling-2-Mini, by the defaults of its config class; its other options are in the recipe.
    "2-mini": ModelSize(2304, 24, 24, 1152, 200_058, recurrent_steps=3, n_kv_heads=8),
}
_ONES = {"weight": nn.init.ones_}


@dataclass(kw_only=True, slots=True)
class InklingOptions(ModelOptions):
    """Options of Inkling; `hidden_dim` is the width of an expert."""

    family: FamilyName = field(default="inkling", init=False)

    exit_gate: bool = False
    """Whether there is an exit gate; the export refuses one."""

    head_dim: Annotated[int, Ge(2)] = 16
    """Width of a head."""

    prelude_layers: Annotated[int, Ge(1)] = 2
    """Number of first layers, which run once; block_layers must divide it."""

    coda_layers: Annotated[int, Ge(0)] = 2
    """Number of last layers, which run once; the looped ones end with a block."""

    block_layers: Annotated[int, Ge(1)] = 2
    """Layers whose sum is one block."""

    full_layers: tuple[int, ...] | None = None
    """Layers without a window, counted from 0; None for the last of every six."""

    window: Annotated[int, Ge(1)] = 1024
    """Keys that a query of the other layers sees, and the extent of their bias."""

    bias_extent: Annotated[int, Ge(1)] = 1024
    """Distances with a bias in layers without a window."""

    bias_width: Annotated[int, Ge(1)] = 16
    """Profiles that a head's bias is mixed from."""

    far_floor: Annotated[int, Ge(1)] = 8192
    """Position from which queries of layers without a window grow."""

    far_alpha: Annotated[float, Ge(0), FINITE] = 0.1
    """Factor on the logarithm by which they grow."""

    qk_clip: Annotated[float, Gt(0), FINITE] = 512**0.5
    """Largest length of a query or key."""

    bias_clip: Annotated[float, Gt(0), FINITE] = 8.0
    """Largest length of a head's weights of the profiles."""

    taps: Annotated[int, Ge(1)] = 4
    """Tokens that a short convolution reads."""

    message_rank: Annotated[int, Ge(1)] = 64
    """Rank of the gates of messages."""

    experts: Annotated[int, Ge(2)] = 8
    """Experts of a layer."""

    top_k: Annotated[int, Ge(1)] = 2
    """Experts that a token visits in a layer."""

    score_scale: Annotated[float, Gt(0), FINITE] = 8.0
    """Factor on the scores of the chosen experts."""

    gate_softcap: Annotated[float, Gt(0), FINITE] = 4.0
    """Cap of an expert's gate."""

    up_softcap: Annotated[float, Gt(0), FINITE] = 25.0
    """Cap of an expert's other factor."""

    logit_softcap: Annotated[float, Gt(0), FINITE] = 30.0
    """Cap of the logits."""

    embedding_rows: Annotated[int | None, Ge(1)] = None
    """Rows of the embedding, of which the head has the first; None for as many as the head."""

    norm_eps: Annotated[float, Gt(0), FINITE] = 1e-6
    """Added to the mean square in norms."""

    initializer_range: Annotated[float, Gt(0), FINITE] = 0.02
    """Standard deviation of initial matrices."""

    bias_rate: Annotated[float, Ge(0), FINITE] = 1e-3
    """Change of an expert's bias in a training step, against unequal loads; 0 turns it off."""

    def canonical(self) -> dict[str, Any]:
        """Return the layers without a window, and the rows of the embedding."""
        full = self.full_layers
        if full is None:
            full = tuple(layer for layer in range(self.n_layers or 0) if layer % 6 == 5)
        rows = self.vocab_size if self.embedding_rows is None else self.embedding_rows
        return {"full_layers": full, "embedding_rows": rows}

    def check_heads(self, shape: ModelSize) -> None:
        """Do nothing: heads have a width of their own, and are not rotated."""

    def implied(self) -> Mapping[str, Any]:
        """Return the record of a plain loop."""
        own = {"prelude_layers", "coda_layers"}
        return {name: value for name, value in PLAIN_LOOP.items() if name not in own}


def _refusals(options: InklingOptions, shape: ModelSize) -> Iterator[Refusal]:
    layers, size = f"model.n_layers={shape.n_layers}", options.block_layers
    looped = shape.n_layers - options.coda_layers
    if looped <= options.prelude_layers:
        yield Refusal.of("model.coda_layers", options.coda_layers, f"leaves no loop in {layers}")
    for name, end in (("prelude_layers", options.prelude_layers), ("coda_layers", looped)):
        if end % size:
            problem = f"ends at layer {end}, which model.block_layers={size} does not divide"
            yield Refusal.of(f"model.{name}", getattr(options, name), problem)
    if not {*(options.full_layers or ())} <= {*range(shape.n_layers)}:
        full = options.full_layers
        yield Refusal.of("model.full_layers", full, f"must be below {layers}", "count from 0")
    if shape.n_heads % (shape.n_kv_heads or shape.n_heads):
        yield Refusal.of("model.n_kv_heads", shape.n_kv_heads, "must divide model.n_heads")
    for name in ("dim", "hidden_dim"):
        if (width := getattr(shape, name)) % 8:  # grouped products read 16 bytes at a time
            yield Refusal.of(f"model.{name}", width, "must be a multiple of 8 with experts")
    if options.top_k > options.experts:
        yield Refusal.of("model.top_k", options.top_k, f"is above model.experts={options.experts}")
    if options.tie_weights:
        yield Refusal.of("model.tie_weights", True, "is not in Inkling", "leave it at False")
    if (rows := options.embedding_rows or shape.vocab_size) < shape.vocab_size:
        yield Refusal.of("model.embedding_rows", rows, f"is below the head's {shape.vocab_size}")


def decoder_config(
    options: InklingOptions, shape: ModelSize, max_seq_len: int
) -> InklingDecoder.Config:
    """Return the architecture; arguments as in `Family.decoder_config`."""
    raise_first(_refusals(options, shape))
    if options.attention not in ("auto", "sdpa"):
        problem = f"model.attention={options.attention} cannot do a relative bias"
        raise UserError(f"{problem}; use sdpa or auto")
    generic = LoopOptions(
        attention="sdpa",
        exit_gate=options.exit_gate,
        initializer_range=options.initializer_range,
        readout_chunk_tokens=options.readout_chunk_tokens,
        norm_placement="readout",
        positions="relative",
        relative_window=max(options.bias_extent, options.window),
        prelude_layers=options.prelude_layers,
        coda_layers=options.coda_layers,
        rope_theta=ROPE_THETA,
    )
    matrix = _drawn(options)
    config = loop_config(
        InklingDecoder.Config,
        generic,
        shape,
        max_seq_len,
        embed_norm=_kept_norm(options, shape),
        messages=MessageQueries.Config(
            dim=shape.dim,
            layers=shape.n_layers - options.prelude_layers - options.coda_layers,
            param_init=dict.fromkeys(("queries", "kv_queries"), nn.init.zeros_),
        ),
        final_input=_reads(shape),
        bias_rate=options.bias_rate,
        norm=_kept_norm(options, shape),
    )
    rows = options.embedding_rows or shape.vocab_size
    config.tok_embeddings = replace(
        config.tok_embeddings, num_embeddings=rows, param_init={"weight": matrix}
    )
    config.lm_head = replace(config.lm_head, softcap=options.logit_softcap)
    config.layers = [
        _layer(index, layer.attention, options, shape) for index, layer in enumerate(config.layers)
    ]
    return config


def _drawn(options: InklingOptions) -> Callable:
    return partial(normal_matrix, std=options.initializer_range)


def _norm(options: InklingOptions, shape: ModelSize) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=shape.dim, eps=options.norm_eps, param_init=_ONES)


def _kept_norm(options: InklingOptions, shape: ModelSize) -> FinalNorm.Config:
    """Return a norm whose weight mixed precision keeps in fp32."""
    return FinalNorm.Config(normalized_shape=shape.dim, eps=options.norm_eps, param_init=_ONES)


def _reads(shape: ModelSize, queries: int = 1) -> BlockAttention.Config:
    zeros = {"query": nn.init.zeros_}
    return BlockAttention.Config(dim=shape.dim, queries=queries, param_init=zeros)


def _layer(
    index: int, usual: Any, options: InklingOptions, shape: ModelSize
) -> InklingBlock.Config:
    full = index in (options.full_layers or ())
    looped = options.prelude_layers <= index < shape.n_layers - options.coda_layers
    matrix, queries = _drawn(options), 3 if full else 1
    convolution = ShortConvolution.Config(
        channels=shape.dim, taps=options.taps, param_init={"weight": matrix}
    )
    experts: Any = SoftcappedExperts.Config(
        dim=shape.dim,
        hidden_dim=shape.hidden_dim,
        num_experts=options.experts,
        gate_softcap=options.gate_softcap,
        up_softcap=options.up_softcap,
        param_init=dict.fromkeys(("gate_up_EFD", "down_EDF"), matrix),
    )
    mixture = Mixture.Config(
        num_experts=options.experts,
        router=TokenChoiceTopKRouter.Config(
            num_experts=options.experts,
            gate=RouterGate.Config(
                in_features=shape.dim, out_features=options.experts, param_init={"weight": matrix}
            ),
            top_k=options.top_k,
            route_norm=True,
            route_scale=options.score_scale,
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=experts,
            token_dispatcher=AllToAllTokenDispatcher.Config(
                num_experts=options.experts, top_k=options.top_k
            ),
        ),
    )
    message = MessageGate.Config(
        dim=shape.dim,
        rank=options.message_rank,
        eps=options.norm_eps,
        param_init={f"{name}_weight": matrix for name in ("down", "forget", "gain")},
    )
    return InklingBlock.Config(
        attention_norm=None,
        attention=_attention(usual, options, shape, full=full),
        ffn_norm=_norm(options, shape),
        mixture=mixture,
        norms_before=tuple(_norm(options, shape) for _ in range(queries)),
        attention_input=_reads(shape, queries) if index else None,
        ffn_input=_reads(shape),
        attention_conv=convolution,
        ffn_conv=replace(convolution),
        message=message if looped else None,
        boundary=index % options.block_layers == 0,
    )


def _attention(
    usual: Any, options: InklingOptions, shape: ModelSize, *, full: bool
) -> InklingAttention.Config:
    heads, kv_heads, width = shape.n_heads, shape.n_kv_heads or shape.n_heads, options.head_dim
    matrix, ones = _drawn(options), {"scale": nn.init.ones_}

    def linear(inputs: int, outputs: int) -> Linear.Config:
        initial = {"weight": matrix}
        return Linear.Config(in_features=inputs, out_features=outputs, param_init=initial)

    keys = kv_heads * width
    convolution: Any = ShortConvolution.Config(
        channels=keys, taps=options.taps, param_init={"weight": matrix}
    )
    if full:
        convolution = DynamicConvolution.Config(
            channels=keys,
            taps=options.taps,
            heads=kv_heads,
            dim=shape.dim,
            param_init={"static_w": nn.init.zeros_, "weight_proj": matrix},
        )
    return InklingAttention.Config.of(
        usual,
        head_dim=width,
        qkv_linear=StreamQKV.Config(
            head_dim=width, wq=linear(shape.dim, heads * width), wkv=linear(shape.dim, keys)
        ),
        wo=linear(heads * width, shape.dim),
        gate=linear(shape.dim, heads * width),
        distance_scores=None,
        window=None if full else options.window,
        q_clip=HeadClip.Config(
            heads=heads, width=width, threshold=options.qk_clip, param_init=ones
        ),
        k_conv=convolution,
        v_conv=replace(convolution),
        bias=RelativeBias.Config(
            linear=linear(shape.dim, heads * options.bias_width),
            clip=HeadClip.Config(
                heads=heads,
                width=options.bias_width,
                threshold=options.bias_clip,
                param_init=ones,
            ),
            extent=options.bias_extent if full else options.window,
            param_init={"bank": matrix},
        ),
        sink=linear(shape.dim, heads),
        floor=options.far_floor if full else 0,
        alpha=options.far_alpha,
        norm_eps=options.norm_eps,
    )


INKLING = Family(
    name="inkling",
    options=InklingOptions,
    sizes=SIZES,
    decoder_config=decoder_config,
    uses=frozenset({"export", "generate", "held_out"}),
    runtime_options=RUNTIME_OPTIONS | {"bias_rate"},
    kv_caches=frozenset({"full"}),
)
