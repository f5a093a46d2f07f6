"""Adaptive loops and memory: every layer decides how often it loops, and reads learned memory.

    h ← layer_ℓ(h, banks),   ℓ = 1 … N,   logits = W_head norm(h)

The recurrence is inside the layers (`layer.py`), so R is 1. Blocks are GPT-2's with rotary
positions. With `max_iterations=None` layers are plain blocks, h ← Block(h). They are the paper's
baselines, made wider (`hidden_dim`) or deeper (`n_layers`). A cache has a slot for each layer and
iteration.

Initialisation is GPT-2's (`titan_loop/models/gpt2_block.py`), with output projections scaled by
1/√(2·layers). α starts at `scale_init`. Router and gates start at 0, except b_g, so that p_t = 1/2
at first. Keys and values start with the standard deviation of a matrix.

Source: Frey et al. 2026, "Adaptive loops and memory in transformers". Its 332M parameters of 36
layers imply a feed-forward part of two matrices and an untied head; its base model then has 162M
parameters, not "200M". Eq. 5–10, taken literally, give 34M parameters of memory, not about 10M.
Deviations, and choices that the paper leaves open: the last iteration takes the remaining mass; a
gate is one number per token and bank, as in its Figure 1; memory is read once, after the loop.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt
from torch import nn
from torchtitan.models.common.nn_modules import LayerNorm

from titan_loop.bounds import FINITE
from titan_loop.families.adaptive.decoder import AdaptiveDecoder
from titan_loop.families.adaptive.layer import AdaptiveLayer, LoopControl
from titan_loop.families.adaptive.memory_bank import BankReader, MemoryBank, MemoryGates
from titan_loop.models.family import (
    RUNTIME_OPTIONS,
    Family,
    FamilyName,
    ModelOptions,
    ModelSize,
    require_usual,
)
from titan_loop.models.gpt2_block import (
    NORM_EPS,
    NORM_INIT,
    block_config,
    gpt2_config,
    matrix_init,
)
from titan_loop.models.loop_options import PLAIN_LOOP, ROPE_THETA
from titan_loop.models.positions import RotateHalf

SIZES = {
    "debugmodel": ModelSize(64, 2, 4, 256, vocab_size=128, recurrent_steps=1),
    "published": ModelSize(768, 12, 12, 3072, vocab_size=50_304, recurrent_steps=1),
}


@dataclass(kw_only=True, slots=True)
class AdaptiveOptions(ModelOptions):
    """Options of models with adaptive loops and memory."""

    retired: ClassVar[Mapping[str, Any]] = {
        "halting": "remainder",
        "scale_rate": 1.0,
        "gate": "scalar",
        "memory_read": "after",
    }

    family: FamilyName = field(default="adaptive", init=False)

    recurrent_steps: Annotated[int | None, Ge(1)] = 1
    """Must be 1: the layers loop, not the stack."""

    exit_gate: bool = False
    """Must be False: every layer has a halting router instead."""

    max_iterations: Annotated[int | None, Ge(1)] = 3
    """N_max, the most iterations of a layer; None makes every layer a plain block, run once."""

    scale_init: Annotated[float, Gt(-math.inf), FINITE] = -7.0
    """Initial α of the loop scales softplus(α)."""

    decay_controls: bool = False
    """Whether weight decay applies to loop scales, router and gates, too."""

    local_slots: Annotated[int | None, Ge(1)] = None
    """Slots of every layer's own memory bank; None for no such bank."""

    global_slots: Annotated[int | None, Ge(1)] = None
    """Slots of the memory bank that all layers share; None for no such bank."""

    gate_bias: Annotated[float, Gt(-math.inf), FINITE] = 3.0
    """Initial b_g: −3 closes the gates, 3 opens them."""

    def implied(self) -> Mapping[str, Any]:
        """Return the record of a plain stack."""
        return PLAIN_LOOP


def _check(options: AdaptiveOptions) -> None:
    """Raise `UserError` for options that make no model."""
    require_usual(options, ("exit_gate",), "does not work with model.family=adaptive")
    if options.max_iterations is None:
        problem = "has no effect without loops (model.max_iterations)"
        require_usual(options, ("scale_init",), problem)
    if options.local_slots is None and options.global_slots is None:
        if options.max_iterations is None:
            problem = "has no effect without loops (model.max_iterations) and without memory"
            require_usual(options, ("decay_controls",), problem)
        problem = "has no effect without memory (model.local_slots, model.global_slots)"
        require_usual(options, ("gate_bias",), problem)


def decoder_config(
    options: AdaptiveOptions, shape: ModelSize, max_seq_len: int
) -> AdaptiveDecoder.Config:
    """Return the architecture; arguments as in `Family.decoder_config`."""
    _check(options)
    dim, matrix = shape.dim, matrix_init(shape.dim)["weight"]
    rotation = RotateHalf.Config(
        dim=dim // shape.n_heads, max_seq_len=max_seq_len, theta=ROPE_THETA
    )
    output_init = matrix_init(dim, scale=(2 * shape.n_layers) ** -0.5)

    def bank(slots: int | None) -> MemoryBank.Config | None:
        if slots is None:
            return None
        init = {"keys": matrix, "values": matrix, "key_gain": nn.init.ones_}
        return MemoryBank.Config(slots=slots, dim=dim, param_init=init)

    def layer() -> AdaptiveLayer.Config:
        own, shared = bank(options.local_slots), bank(options.global_slots)
        banks = sum(each is not None for each in (own, shared))
        config = AdaptiveLayer.Config(
            block=block_config(shape, options.attention, rotation, output_init),
            bank=own,
            shared_bank=shared,
            readers=tuple(
                BankReader.Config(
                    dim=dim, param_init={"query_gain": nn.init.ones_, "output": matrix}
                )
                for _ in range(banks)
            ),
        )
        if options.max_iterations is not None:
            config.loop_norm = LayerNorm.Config(
                normalized_shape=dim, eps=NORM_EPS, param_init=NORM_INIT
            )
            config.control = LoopControl.Config(
                dim=dim,
                max_iterations=options.max_iterations,
                param_init={
                    "scale": partial(nn.init.constant_, val=options.scale_init),
                    **dict.fromkeys(("weight", "step_weight", "bias"), nn.init.zeros_),
                },
            )
        if banks:
            config.gates = MemoryGates.Config(
                banks=banks,
                dim=dim,
                param_init={
                    "weight": nn.init.zeros_,
                    "bias": partial(nn.init.constant_, val=options.gate_bias),
                },
            )
        return config

    return gpt2_config(
        AdaptiveDecoder.Config,
        options,
        shape,
        table={"weight": matrix},
        layers=[layer() for _ in range(shape.n_layers)],
        bank=bank(options.global_slots),
        decay_controls=options.decay_controls,
    )


ADAPTIVE = Family(
    name="adaptive",
    options=AdaptiveOptions,
    sizes=SIZES,
    decoder_config=decoder_config,
    uses=frozenset({"generate", "held_out"}),
    exit_policies=frozenset({"static"}),
    runtime_options=RUNTIME_OPTIONS | {"scale_init", "decay_controls", "gate_bias"},
)
