"""A looped decoder of Llama's blocks: options and initial weights.

    block:  x ← x + attention(n1(x)),   x ← x + SwiGLU(n2(x))

Source: Touvron et al. 2023 (Llama), arXiv 2302.13971. Deviation: initial output projections are
scaled by 1/sqrt(2·layers), as in GPT-2, or as `residual_scale` sets.
"""

import math
from collections.abc import Container
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, TypeVar

from annotated_types import Gt, Lt

from titan_loop.errors import UserError
from titan_loop.models.attention import LoopAttention
from titan_loop.models.block import DenseBlock
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import ModelOptions, ModelSize, resolved_shape
from titan_loop.models.final_norm import NormPlacement
from titan_loop.models.initialisation import normal_matrix
from titan_loop.models.loop_config import loop_config, residual_gain, width_ratio
from titan_loop.models.loop_options import LoopOptions

LLAMA_SIZES = {
    "debugmodel": ModelSize(64, 2, 4, 192, vocab_size=128, recurrent_steps=3, n_kv_heads=2),
    "quickstart": ModelSize(128, 4, 4, 384, vocab_size=1024, n_kv_heads=2),
    # Shapes of dense models, which are loops of one step until they are retrofitted.
    "smollm2-135m": ModelSize(576, 30, 9, 1536, 49_152, recurrent_steps=1, n_kv_heads=3),
    "smollm2-360m": ModelSize(960, 32, 15, 2560, 49_152, recurrent_steps=1, n_kv_heads=5),
    "tinyllama-1.1b": ModelSize(2048, 22, 32, 5632, 32_000, recurrent_steps=1, n_kv_heads=4),
}


@dataclass(kw_only=True, slots=True)
class LlamaOptions(LoopOptions):
    """Options of families whose layers are Llama's blocks."""

    exit_gate: bool = False
    """Whether there is an exit gate; the formats of other engines have no place for one."""

    norm_placement: NormPlacement = "readout"
    """Place of the final norm: at the readout only, or after every recurrent step."""

    norm_eps: Annotated[float, Gt(0), Lt(1)] = 1e-5
    """Added to the mean square in every norm."""


def llama_part(
    options: ModelOptions, sizes: Container[str], *, holder: object, made: str
) -> dict[str, Any]:
    """Return the options of a model of Llama's blocks that another family takes over.

    Args:
        sizes: Sizes of that family, by name.
        holder: Whose options they are, and `made` what becomes of them, in an error.

    Raises:
        UserError: The model is of another family, or has parts that Llama's blocks have not.
    """
    if not isinstance(options, LlamaOptions) or options.family != "nanbeige":
        raise UserError(f"{holder} is of family {options.family}; give a model of family nanbeige")
    if options.branch_scale:
        raise UserError(
            f"{holder} has model.branch_scale={options.branch_scale}, a factor that would change "
            f"with the loop; {made} of a model with 0.0"
        )
    names = [option.name for option in fields(LlamaOptions) if option.init]
    plain = type(options)()
    for name in {option.name for option in fields(options)} - {*names, "family"}:
        if getattr(options, name) not in (getattr(plain, name), ()):
            raise UserError(
                f"{holder} has model.{name}={getattr(options, name)}; {made} of Llama's blocks, "
                f"which have {getattr(plain, name)}"
            )
    size = options.size if options.size in sizes else "debugmodel"
    same = {name: getattr(options, name) for name in names}
    return same | asdict(resolved_shape(options)) | {"size": size}


DecoderConfig = TypeVar("DecoderConfig", bound=LoopDecoder.Config)


def llama_config(
    kind: type[DecoderConfig], options: LlamaOptions, shape: ModelSize, max_seq_len: int, **own: Any
) -> DecoderConfig:
    """Return the architecture; arguments and errors as in `loop_config`."""
    config = loop_config(kind, options, shape, max_seq_len, **own)
    config.norm = replace(config.norm, eps=options.norm_eps)
    config.layers = [_pre_norm(layer, options, shape) for layer in config.layers]
    return config


def _pre_norm(
    layer: DenseBlock.Config, options: LlamaOptions, shape: ModelSize
) -> DenseBlock.Config:
    """Return a layer without the norms after its branches, whose gain the output matrices take."""
    gain = residual_gain(options, shape)
    std = options.initializer_range * gain / math.sqrt(width_ratio(options, shape))
    output = {"weight": partial(normal_matrix, std=std)}
    assert layer.attention_norm is not None
    assert layer.ffn_norm is not None
    assert layer.feed_forward is not None
    assert isinstance(layer.attention, LoopAttention.Config)
    layer.attention.wo = replace(layer.attention.wo, param_init=output)
    layer.feed_forward.w2 = replace(layer.feed_forward.w2, param_init=output)
    return DenseBlock.Config(
        attention_norm=replace(layer.attention_norm, eps=options.norm_eps),
        attention=layer.attention,
        ffn_norm=replace(layer.ffn_norm, eps=options.norm_eps),
        feed_forward=layer.feed_forward,
        dropout=layer.dropout,
        branch_scale=layer.branch_scale,
    )
