"""A looped decoder of dense models' blocks, every difference between which is an option.

    h_r = n(block_N(… block_1(h_{r−1}) …)),   n = final norm, or the identity
    block as in `titan_loop/models/block.py`

With P `prelude_layers` or K `coda_layers` only the C layers between them are looped. With the norm
at the readout alone, R steps equal a dense model of P + R·C + K layers; R = 1 is the dense model.
The defaults are Llama's. Records call this family nanbeige, after the first published loops of
Llama's blocks (Nanbeige4.2).

| model | what differs from Llama |
|---|---|
| Llama 3.1, 3.2 | `rope_scaling` llama3 |
| Mistral | `window`, `head_dim` |
| Qwen 2 | `attention_biases` of q, k and v |
| Qwen 3 | `qk_norm` of each head, `head_dim` |
| OLMo 2, OLMo 3 | norms after the branches, `qk_norm` of all heads; OLMo 3 also `window` |
| Gemma 2, Gemma 3 | norms before and after, gains 1 + w, GELU, `embedding_scale`, `window`, caps |
| SmolLM3 | `unrotated_layers` |
| Granite | `embedding_scale`, `residual_multiplier`, `attention_scale`, `logit_scale` |
| Phi 3, Phi 4 mini | `rotary_dim`, `window` |
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from annotated_types import Ge, Gt
from torch import nn
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm

from titan_loop.bounds import FINITE
from titan_loop.errors import Refusal, UserError, caught, raise_first
from titan_loop.models.attention import LoopAttention
from titan_loop.models.block import DenseBlock, GELUGatedFeedForward
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import Family, FamilyName, ModelSize, require_usual
from titan_loop.models.llama import LLAMA_SIZES, LlamaOptions, llama_config
from titan_loop.models.loop_config import residual_gain
from titan_loop.models.norms import AllHeadsNorm, OffsetNorm
from titan_loop.models.positions import SCORES, NoRotation, RotaryPositions, RotateHalf
from titan_loop.models.rotary import RopeScaling, Rotation

NormOrder: TypeAlias = Literal["before", "after", "both"]
QKNorm: TypeAlias = Literal["none", "head", "all"]
AttentionBiases: TypeAlias = Literal["none", "qkv", "qkvo"]
Activation: TypeAlias = Literal["silu", "gelu"]


@dataclass(kw_only=True, slots=True)
class BlockOptions(LlamaOptions):
    """Options of families whose layers are a dense model's blocks; the defaults are Llama's."""

    head_dim: Annotated[int | None, Ge(2)] = None
    """Width of a head; None takes dim/n_heads."""

    norm_order: NormOrder = "before"
    """Norms of a layer: before its branches, after them, or both."""

    norm_offset: bool = False
    """Whether the gain of every norm is 1 + w instead of w, as in Gemma."""

    qk_norm: QKNorm = "none"
    """Norm of queries and keys before they are rotated: none, of each head, or of all at once."""

    attention_biases: AttentionBiases = "none"
    """Attention's projections with a bias: none, qkv, or qkvo, the output too."""

    feed_forward_biases: bool = False
    """Whether the feed-forward's projections have biases."""

    activation: Activation = "silu"
    """Activation of the feed-forward's gate: silu, or the tanh form of gelu."""

    rope_scaling: RopeScaling = "none"
    """Scaling of the rotations' frequencies for longer windows: none, linear, llama3 or yarn."""

    rope_factor: Annotated[float, Ge(1), FINITE] = 1.0
    """Growth of the window by that scaling."""

    rope_original: Annotated[int, Ge(0)] = 0
    """Window before that scaling, in tokens; llama3 and yarn need it."""

    rope_low: Annotated[float, Gt(0), FINITE] = 1.0
    """llama3's low_freq_factor, or yarn's beta_slow."""

    rope_high: Annotated[float, Gt(0), FINITE] = 4.0
    """llama3's high_freq_factor, or yarn's beta_fast."""

    rope_attention_factor: Annotated[float, Gt(0), FINITE] = 1.0
    """yarn's factor on rotated queries and keys."""

    rope_truncate: bool = True
    """Whether yarn's bounds are whole elements."""

    rotary_dim: Annotated[int | None, Ge(2)] = None
    """Elements of a head that are rotated, the first ones; None for all."""

    window: Annotated[int | None, Ge(1)] = None
    """Keys that a query of windowed layers sees, itself among them; None for all."""

    windowed_layers: tuple[int, ...] | None = None
    """Layers with that window, counted from 0; None for all."""

    window_rope_theta: Annotated[float | None, Gt(0), FINITE] = None
    """Base of windowed layers, whose rotations are then not scaled; None rotates as elsewhere."""

    unrotated_layers: tuple[int, ...] = ()
    """Layers without rotations, counted from 0."""

    attention_scale: Annotated[float | None, Gt(0), FINITE] = None
    """Factor on the scores of attention; None takes 1/sqrt(head_dim)."""

    attention_softcap: Annotated[float, Ge(0), FINITE] = 0.0
    """c of c·tanh(s/c) in place of attention's scores s; 0 for none."""

    residual_multiplier: Annotated[float, Gt(0), FINITE] = 1.0
    """Factor on everything that a layer adds to the state."""

    embedding_scale: Annotated[float, Gt(0), FINITE] = 1.0
    """Factor on token embeddings where they enter the state."""

    logit_scale: Annotated[float, Gt(0), FINITE] = 1.0
    """Factor on the logits."""

    logit_softcap: Annotated[float, Ge(0), FINITE] = 0.0
    """c of c·tanh(s/c) in place of the logits s; 0 for none."""

    def canonical(self) -> dict[str, Any]:
        """Return the rotary base, and the layers with a window one by one."""
        every = range(0 if self.window is None else self.n_layers or 0)
        windowed = every if self.windowed_layers is None else self.windowed_layers
        return {**LlamaOptions.canonical(self), "windowed_layers": tuple(windowed)}

    def check_heads(self, shape: ModelSize) -> None:
        """As in the base class; the heads' own width need not divide D."""
        if self.head_dim is None:
            LlamaOptions.check_heads(self, shape)
        elif self.head_dim % 2:
            raise UserError(f"model.head_dim={self.head_dim} must be even, for rotations")


DecoderConfig = TypeVar("DecoderConfig", bound=LoopDecoder.Config)


def dense_config(
    kind: type[DecoderConfig], options: BlockOptions, shape: ModelSize, max_seq_len: int, **own: Any
) -> DecoderConfig:
    """Return the architecture; arguments and errors as in `loop_config`."""
    raise_first(_refusals(options, shape))
    config = llama_config(kind, options, shape, max_seq_len, **own)
    if options.embedding_scale != 1:
        config.embedding_scale = options.embedding_scale
    config.norm = _offset(config.norm, options)
    config.lm_head = replace(
        config.lm_head, scale=options.logit_scale, softcap=options.logit_softcap
    )
    tables = rotations(options, head_dim(options, shape))
    if isinstance(config.positions, RotaryPositions.Config):
        config.positions = RotaryPositions.Config(rotations=tables)
    config.layers = [
        _layer(layer, index, options, shape, tables) for index, layer in enumerate(config.layers)
    ]
    return config


def _refusals(options: BlockOptions, shape: ModelSize) -> Iterator[Refusal]:
    layers = f"model.n_layers={shape.n_layers}"
    for name in ("windowed_layers", "unrotated_layers"):
        chosen = getattr(options, name)
        if not {*chosen} <= {*range(shape.n_layers)}:
            yield Refusal.of(f"model.{name}", chosen, f"must be below {layers}", "count from 0")
    if options.windowed_layers and options.window is None:
        yield Refusal.of("model.window", None, "must be set with model.windowed_layers")
    if options.window_rope_theta is not None and options.window is None:
        yield Refusal.of("model.window", None, "must be set with model.window_rope_theta")
    if options.qk_norm == "all" and options.norm_offset:
        problem = "does not work with model.norm_offset=True"
        yield Refusal.of("model.qk_norm", "all", problem, "use head")
    width = head_dim(options, shape)
    if options.rotary_dim is not None and (options.rotary_dim > width or options.rotary_dim % 2):
        fix = f"must be even and at most a head's {width}"
        yield Refusal.of("model.rotary_dim", options.rotary_dim, fix)
    rotates = {"rope_scaling": "none", "rotary_dim": None, "unrotated_layers": ()}
    rotates |= {"rope_attention_factor": 1.0, "window_rope_theta": None}
    for name, plain in rotates.items():
        if options.positions != "rope" and getattr(options, name) != plain:
            problem = f"has no effect with model.positions={options.positions}"
            yield Refusal.of(f"model.{name}", getattr(options, name), problem, "leave it out")
    unread = {"none": 0, "linear": 1, "llama3": 4, "yarn": 5}[options.rope_scaling]
    names = ("rope_factor", "rope_original", "rope_low", "rope_high", "rope_truncate")[unread:]
    problem = f"has no effect with model.rope_scaling={options.rope_scaling}"
    yield from caught("model", lambda: require_usual(options, names, problem))
    if options.scale_embeddings and options.embedding_scale != 1:
        problem = "has no effect with model.scale_embeddings=True; leave one of them out"
        yield Refusal.of("model.embedding_scale", options.embedding_scale, problem)
    if options.attention_softcap and options.positions in SCORES:
        problem = f"does not work with model.positions={options.positions}, which adds to scores"
        yield Refusal.of("model.attention_softcap", options.attention_softcap, problem, "use rope")
    if options.rope_scaling in ("llama3", "yarn"):
        if not options.rope_original:
            scaling = f"model.rope_scaling={options.rope_scaling}"
            yield Refusal.of("model.rope_original", 0, f"must be set with {scaling}")
        if options.rope_low >= options.rope_high:
            high = f"model.rope_high={options.rope_high}"
            yield Refusal.of("model.rope_low", options.rope_low, f"must be below {high}")
    if options.attention == "varlen":
        for name, plain in {"window": None, "attention_softcap": 0}.items():
            if getattr(options, name) != plain:
                asked = f"model.{name}={getattr(options, name)}"
                yield Refusal.of("model.attention", "varlen", f"cannot do {asked}", "use flex")


def head_dim(options: BlockOptions, shape: ModelSize) -> int:
    """Return the width of a head."""
    return options.head_dim or shape.dim // shape.n_heads


def rotations(options: BlockOptions, width: int) -> tuple[Rotation, ...]:
    """Return the rotations of layers with all keys, and of layers with a window if they differ.

    `width` is a head's.
    """
    assert options.rope_theta is not None, "options are resolved"
    dim = options.rotary_dim or width
    usual = Rotation(
        dim=dim,
        theta=options.rope_theta,
        scaling=options.rope_scaling,
        factor=options.rope_factor,
        original=options.rope_original,
        low=options.rope_low,
        high=options.rope_high,
        attention_factor=options.rope_attention_factor,
        truncate=options.rope_truncate,
    )
    if options.window_rope_theta is None:
        return (usual,)
    return usual, Rotation(dim=dim, theta=options.window_rope_theta)


def _offset(norm: RMSNorm.Config, options: BlockOptions, gain: float = 1.0) -> Any:
    """Return a norm that starts at `gain`, with the options' kind of weight."""
    if not options.norm_offset:
        start = {"weight": partial(nn.init.constant_, val=gain)}
        return replace(norm, **({} if gain == 1 else {"param_init": start}))
    start = {"weight": partial(nn.init.constant_, val=gain - 1)}
    shape, eps = norm.normalized_shape, norm.eps
    return OffsetNorm.Config(normalized_shape=shape, eps=eps, param_init=start)


def _layer(
    layer: DenseBlock.Config,
    index: int,
    options: BlockOptions,
    shape: ModelSize,
    tables: tuple[Rotation, ...],
) -> DenseBlock.Config:
    """Turn a layer of Llama's into the options' layer."""
    assert layer.attention_norm is not None
    assert layer.feed_forward is not None
    assert isinstance(layer.attention, LoopAttention.Config)
    ffn = layer.feed_forward
    if options.feed_forward_biases:
        ffn = replace(ffn, w1=_biased(ffn.w1), w2=_biased(ffn.w2), w3=_biased(ffn.w3))
    if options.activation == "gelu":
        ffn = GELUGatedFeedForward.Config(w1=ffn.w1, w2=ffn.w2, w3=ffn.w3)
    norm, inner = layer.attention_norm, options.norm_order != "after"
    after = None
    if options.norm_order != "before":  # their gains take the place of the output matrices'
        after = _offset(norm, options, residual_gain(options, shape))
        layer.attention.wo = replace(layer.attention.wo, param_init=ffn.w1.param_init)
        ffn = replace(ffn, w2=replace(ffn.w2, param_init=ffn.w1.param_init))
    return replace(
        layer,
        attention_norm=_offset(norm, options) if inner else None,
        attention=_attention(layer.attention, index, options, tables),
        attention_post_norm=after,
        ffn_norm=_offset(norm, options) if inner else None,
        feed_forward=ffn,
        ffn_post_norm=None if after is None else replace(after),
        branch_scale=layer.branch_scale * options.residual_multiplier,
    )


def _attention(
    attention: LoopAttention.Config,
    index: int,
    options: BlockOptions,
    tables: tuple[Rotation, ...],
) -> LoopAttention.Config:
    windowed = index in (options.windowed_layers or ())
    table = 1 if windowed and len(tables) > 1 else 0
    rope = attention.rope
    if type(rope) is RotateHalf.Config:  # another kind of positions rotates nothing
        kind = NoRotation if index in options.unrotated_layers else RotateHalf
        turned, theta = tables[table].dim, tables[table].theta
        rope = kind.Config(dim=turned, max_seq_len=rope.max_seq_len, theta=theta, table=table)
    qkv, wo = attention.qkv_linear, attention.wo
    assert isinstance(qkv, QKVLinear.Config)
    if options.attention_biases != "none":
        qkv = replace(qkv, wq=_biased(qkv.wq), wkv=_biased(qkv.wkv))
    if options.attention_biases == "qkvo":
        wo = _biased(wo)
    norms: dict[str, Any] = {}
    if options.qk_norm != "none":
        kind = RMSNorm if options.qk_norm == "head" else AllHeadsNorm
        for name, width in zip(("q_norm", "k_norm"), attention.widths, strict=True):
            size = qkv.head_dim if options.qk_norm == "head" else width
            ones = {"weight": nn.init.ones_}
            norm = kind.Config(normalized_shape=size, eps=options.norm_eps, param_init=ones)
            norms[name] = _offset(norm, options)
    return replace(
        attention,
        qkv_linear=qkv,
        wo=wo,
        rope=rope,
        scale=options.attention_scale,
        softcap=options.attention_softcap,
        window=options.window if windowed else None,
        **norms,
    )


def _biased(linear: Linear.Config) -> Linear.Config:
    initial: dict[str, Callable] = {**(linear.param_init or {}), "bias": nn.init.zeros_}
    return replace(linear, bias=True, param_init=initial)


@dataclass(kw_only=True, slots=True)
class DenseOptions(BlockOptions):
    """Options of a loop, or a dense model, of these blocks and nothing else."""

    family: FamilyName = field(default="nanbeige", init=False)


DENSE = Family(
    name="nanbeige",
    options=DenseOptions,
    sizes=LLAMA_SIZES,
    decoder_config=partial(dense_config, LoopDecoder.Config),
)
