"""Retrofitted models: Llama's layers, of which a span is looped, with the parts that help it.

    e = prelude(embed(x)),   x_1 = e
    g = the core's layers
    h_r = x_r + (g(x_r) − x_r) / K,   x_{r+1} = h_r, or h_r + W RMSNorm(e) with a bridge
    logits = head(norm(coda(h_R)))

| symbol | code |
|---|---|
| K | `model.damping`: steps that make one pass through the core; 1 is the whole pass |
| W | `Bridge` (`bridge.py`), with `model.bridge` |

With K = 1 and R = 1 this is the dense model that it was made of. With neither bridge nor damping it
is family `nanbeige`, which `plain` retrofits become.

Sources: Shapiro 2026, arXiv 2608.11233 (bridge); arXiv 2605.23872 (damped steps of a trained
model).
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from titan_loop.errors import UserError
from titan_loop.families.retrofit.bridge import Bridge, bridge_config
from titan_loop.models.context import LoopContext
from titan_loop.models.family import RUNTIME_OPTIONS, Family, FamilyName, ModelSize
from titan_loop.models.injection import Injected
from titan_loop.models.llama import LLAMA_SIZES, LlamaDecoder, LlamaOptions, llama_config
from titan_loop.models.parameter_groups import ParameterGroup
from titan_loop.models.recurrence import Carry
from titan_loop.models.units import Unit


@dataclass(kw_only=True, slots=True)
class RetrofitOptions(LlamaOptions):
    """Which retrofitted model to train; `titan-loop retrofit` makes its first checkpoint."""

    family: FamilyName = field(default="retrofit", init=False)

    bridge: bool = False
    """Whether every step but the first reads the prelude's output again, through a projection."""

    damping: int = 1
    """K, the number of steps that make one pass through the looped layers: each moves the state by
    1/K of the way."""

    new_rate_factor: float = 1.0
    """Learning rate of the parameters that the dense model lacks over the scheduled one."""


class RetrofitDecoder(LlamaDecoder):
    """A looped decoder of Llama's blocks with what a retrofit adds."""

    @dataclass(kw_only=True, slots=True)
    class Config(LlamaDecoder.Config):
        """The added parts."""

        bridge: Bridge.Config | None
        damping: int
        new_rate_factor: float

        def set_sharding(self, *, enable_sp: bool) -> None:
            """Declare placements, the added parts' too."""
            LlamaDecoder.Config.set_sharding(self, enable_sp=enable_sp)
            if self.bridge is not None:
                self.bridge.set_sharding(enable_sp=enable_sp)

        def reaches_start(self, recurrent_steps: float, reached: float) -> bool:
            """As in the base class; a bridge reaches the prelude from every step."""
            inherited = LlamaDecoder.Config.reaches_start(self, recurrent_steps, reached)
            return inherited or (reached > 0 and self.bridge is not None)

        def architecture(self) -> dict[str, Any]:
            """As in the base class, with the added parts."""
            inherited = LlamaDecoder.Config.architecture(self)
            return {**inherited, "bridge": self.bridge is not None, "damping": self.damping}

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.bridge = None if config.bridge is None else config.bridge.build()

    def start(self, tokens: Tensor, context: LoopContext) -> Carry:
        """Return the carry of step 1: the prelude's output, twice with a bridge."""
        prelude_BLD = super().start(tokens, context)
        return prelude_BLD if self.bridge is None else Injected(prelude_BLD, prelude_BLD)

    def input(self, carry: Carry, context: LoopContext) -> Tensor:
        """Return the first looped layer's input; arguments as in the base class."""
        return carry if self.bridge is None else carry.hidden_BLD

    def step(self, carry: Carry, step: int | Tensor, context: LoopContext) -> Tensor:
        """Return the state after a step, which may go a part of the way only."""
        passed_BLD = super().step(carry, step, context)
        if self.config.damping == 1:
            return passed_BLD
        return torch.lerp(self.input(carry, context), passed_BLD, 1 / self.config.damping)

    def advance(
        self, carry: Carry, hidden_BLD: Tensor, step: int | Tensor, context: LoopContext
    ) -> Carry:
        """Return the next step's carry; arguments as in the base class."""
        if self.bridge is None:
            return hidden_BLD
        return carry._replace(hidden_BLD=self.bridge(hidden_BLD, carry.embedding_BLD))

    def units(self) -> list[Unit]:
        """List the units, the bridge's own among them."""
        added = [] if self.bridge is None else [Unit("bridge", (self.bridge,), place="between")]
        return [*super().units(), *added]

    def parameter_group(self, name: str, parameter: Tensor) -> ParameterGroup:
        """As in the base class, with the new parameters' own rate."""
        group = super().parameter_group(name, parameter)
        is_new = name.startswith("bridge.")
        return replace(group, rate_factor=self.config.new_rate_factor) if is_new else group


def decoder_config(
    options: RetrofitOptions, shape: ModelSize, max_seq_len: int
) -> RetrofitDecoder.Config:
    """Return the architecture; arguments as of `Family.decoder_config`."""
    if options.damping < 1:
        raise UserError(f"model.damping={options.damping} must be at least 1")
    if options.injection != "none":
        raise UserError(
            f"model.injection={options.injection}: a retrofitted loop reads its prelude through "
            "model.bridge; leave it at none"
        )
    if options.new_rate_factor <= 0:
        raise UserError(f"model.new_rate_factor={options.new_rate_factor} must be above 0")
    return llama_config(
        RetrofitDecoder.Config,
        options,
        shape,
        max_seq_len,
        bridge=bridge_config(shape.dim, options.norm_eps) if options.bridge else None,
        damping=options.damping,
        new_rate_factor=options.new_rate_factor,
    )


RETROFIT = Family(
    name="retrofit",
    options=RetrofitOptions,
    sizes=LLAMA_SIZES,
    decoder_config=decoder_config,
    runtime_options=RUNTIME_OPTIONS | {"new_rate_factor"},
    uses=frozenset({"analyse", "generate", "held_out"}),
)
