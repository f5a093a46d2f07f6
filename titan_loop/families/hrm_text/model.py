"""HRM-Text: named sizes, options and initial weights; `decoder.py` has the equations.

Initial weights are the released code's, drawn from truncated normal distributions. The standard
deviation is 1/√(inputs) for matrices, 1/s for the embedding, which is scaled by s = √D, and 1 for
l_0.

Source: Wang et al. 2026 (HRM-Text), arXiv 2605.20613, and its released code, whose sizes B, L, XL,
XXL and XXL_wide are listed below, with a vocabulary of 65,536; `1b` is XL, the released model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from annotated_types import Ge, Gt
from torchtitan.models.common.nn_modules import RMSNorm

from titan_loop.bounds import FINITE
from titan_loop.errors import UserError
from titan_loop.families.hrm_text.decoder import HrmDecoder
from titan_loop.models.attention import LoopAttention
from titan_loop.models.block import DenseBlock
from titan_loop.models.family import Family, FamilyName, ModelOptions, ModelSize
from titan_loop.models.gpt2_block import StateBias
from titan_loop.models.initialisation import normal_matrix
from titan_loop.models.loop_config import loop_config
from titan_loop.models.loop_options import PLAIN_LOOP, ROPE_THETA, LoopOptions

SIZES = {
    "debugmodel": ModelSize(64, 4, 4, 192, vocab_size=128, recurrent_steps=2),
    "b": ModelSize(1024, 12, 8, 2816, vocab_size=65_536, recurrent_steps=2),
    "l": ModelSize(1280, 24, 10, 3584, vocab_size=65_536, recurrent_steps=2),
    "1b": ModelSize(1536, 32, 12, 4096, vocab_size=65_536, recurrent_steps=2),
    "xxl": ModelSize(1792, 72, 14, 4864, vocab_size=65_536, recurrent_steps=2),
    "xxl-wide": ModelSize(2560, 32, 20, 6912, vocab_size=65_536, recurrent_steps=2),
}


@dataclass(kw_only=True, slots=True)
class HrmTextOptions(ModelOptions):
    """Options of HRM-Text; `recurrent_steps` counts high cycles, `n_layers` both stacks' layers."""

    family: FamilyName = field(default="hrm_text", init=False)

    exit_gate: bool = False
    """Whether there is an exit gate; every export of this family refuses one."""

    low_cycles: Annotated[int, Ge(1)] = 3
    """Passes of the low stack in every high cycle."""

    prefix_lm: bool = True
    """Whether a prompt's tokens see each other both ways; dataloader.prefix marks them."""

    embedding_scale: Annotated[float | None, Gt(0), FINITE] = None
    """Factor s on embeddings; None takes the factor of the starting weights, else √D."""

    rope_theta: Annotated[float | None, Gt(0), FINITE] = None
    """Base of the rotary embedding; None takes the base of the starting weights, else 10,000."""

    norm_eps: Annotated[float, Gt(0), FINITE] = 1e-6
    """Added to the mean square in every norm."""

    def canonical(self) -> dict[str, Any]:
        """Return the rotary base and the factor on embeddings."""
        assert self.dim is not None
        scale, theta = self.embedding_scale, self.rope_theta
        return {
            "embedding_scale": self.dim**0.5 if scale is None else scale,
            "rope_theta": ROPE_THETA if theta is None else theta,
        }

    def implied(self) -> Mapping[str, Any]:
        """Return the record of a plain loop."""
        return {**PLAIN_LOOP, "norm_placement": "every_step"}


def _check(options: HrmTextOptions, shape: ModelSize) -> None:
    if shape.n_layers % 2:
        raise UserError(f"model.n_layers={shape.n_layers} must be even: half are the low stack")
    if shape.n_kv_heads not in (None, shape.n_heads):
        raise UserError(f"model.n_kv_heads={shape.n_kv_heads} must be n_heads={shape.n_heads}")
    if options.prefix_lm and options.attention == "varlen":
        raise UserError("model.attention=varlen cannot do model.prefix_lm=True; use flex or sdpa")


def decoder_config(
    options: HrmTextOptions, shape: ModelSize, max_seq_len: int
) -> HrmDecoder.Config:
    """Return the architecture; arguments as in `Family.decoder_config`."""
    _check(options, shape)
    scale = options.embedding_scale
    assert scale is not None
    generic = LoopOptions(
        attention=options.attention,
        exit_gate=options.exit_gate,
        initializer_range=shape.dim**-0.5,
        readout_chunk_tokens=options.readout_chunk_tokens,
        rope_theta=options.rope_theta,
        tie_weights=options.tie_weights,
    )
    norm = RMSNorm.Config(
        normalized_shape=shape.dim, eps=options.norm_eps, elementwise_affine=False
    )
    config = loop_config(
        HrmDecoder.Config,
        generic,
        shape,
        max_seq_len,
        norm=norm,
        low_start=StateBias.Config(dim=shape.dim, param_init=_normal(1.0)),
        low_cycles=options.low_cycles,
        embedding_scale=scale,
        prefix_lm=options.prefix_lm,
    )
    config.tok_embeddings = replace(config.tok_embeddings, param_init=_normal(1 / scale))
    config.layers = [_gated(layer, norm) for layer in config.layers]
    return config


def _gated(layer: DenseBlock.Config, norm: RMSNorm.Config) -> DenseBlock.Config:
    """Return a layer whose heads are gated and whose two norms have no gain."""
    attention, branch = layer.attention, layer.feed_forward
    assert isinstance(attention, LoopAttention.Config)
    assert branch is not None
    attention.gate = replace(attention.wo)
    branch.w2 = replace(branch.w2, param_init=_normal(branch.w2.in_features**-0.5))
    return DenseBlock.Config(
        attention_norm=replace(norm),
        attention=attention,
        ffn_norm=replace(norm),
        feed_forward=branch,
    )


def _normal(std: float) -> dict[str, Callable]:
    return {"weight": partial(normal_matrix, std=std)}


HRM_TEXT = Family(
    name="hrm_text",
    options=HrmTextOptions,
    sizes=SIZES,
    decoder_config=decoder_config,
    uses=frozenset({"export", "generate", "held_out"}),
)
