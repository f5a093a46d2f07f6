"""LoopCoder: options and architecture; `decoder.py` has the equations.

Gates start at 1/2, as in mlx-lm: their weights and biases are zeros.
"""

from dataclasses import dataclass, field, fields
from typing import Annotated

from annotated_types import Ge
from torch import nn

from titan_loop.errors import Refusal, raise_first
from titan_loop.families.loopcoder.decoder import (
    HeadGate,
    LoopCoderBlock,
    LoopCoderDecoder,
    TwoReachAttention,
)
from titan_loop.models.attention import LoopAttention
from titan_loop.models.block import DenseBlock
from titan_loop.models.family import USES, Family, FamilyName, ModelSize
from titan_loop.models.llama import LLAMA_SIZES, LlamaOptions, llama_config

SIZES = {
    **{name: LLAMA_SIZES[name] for name in ("debugmodel", "quickstart")},
    # IQuest-Coder-V1-40B-Loop, by the defaults of its config class.
    "40b": ModelSize(5120, 80, 40, 27_648, 76_800, recurrent_steps=2, n_kv_heads=8),
}
_PLAIN = {
    "positions": "rope",
    "injection": "none",
    "prelude_layers": 0,
    "coda_layers": 0,
}
"""Options of Llama's loops that have one value here."""


@dataclass(kw_only=True, slots=True)
class LoopCoderOptions(LlamaOptions):
    """Options of LoopCoder; every step from the second on mixes global and local attention."""

    family: FamilyName = field(default="loopcoder", init=False)

    loop_window: Annotated[int, Ge(1)] = 64
    """Keys of its own step that a token sees from step 2 on, itself among them."""


def decoder_config(
    options: LoopCoderOptions, shape: ModelSize, max_seq_len: int
) -> LoopCoderDecoder.Config:
    """Return the architecture; arguments as in `Family.decoder_config`."""
    raise_first(
        Refusal.of(
            f"model.{name}", getattr(options, name), f"is not in LoopCoder; leave it at {plain}"
        )
        for name, plain in _PLAIN.items()
        if getattr(options, name) != plain
    )
    raise_first(
        Refusal.of("model.attention", "varlen", "cannot do model.loop_window", "use flex")
        for _ in range(options.attention == "varlen")
    )
    config = llama_config(LoopCoderDecoder.Config, options, shape, max_seq_len)
    config.layers = [_two_reaches(layer, options.loop_window) for layer in config.layers]
    return config


def _two_reaches(layer: DenseBlock.Config, window: int) -> LoopCoderBlock.Config:
    attention = layer.attention
    assert isinstance(attention, LoopAttention.Config)
    mix = HeadGate.Config(
        n_heads=attention.n_heads,
        head_dim=attention.widths[0] // attention.n_heads,
        param_init={"weight": nn.init.zeros_, "bias": nn.init.zeros_},
    )
    parts = {each.name: getattr(layer, each.name) for each in fields(layer)}
    parts["attention"] = TwoReachAttention.Config.of(attention, window, mix)
    return LoopCoderBlock.Config(**parts)


LOOPCODER = Family(
    name="loopcoder",
    options=LoopCoderOptions,
    sizes=SIZES,
    decoder_config=decoder_config,
    uses=USES - {"analyse"},  # a state is not all that a step hands on
    kv_caches=frozenset({"full", "window"}),
)
