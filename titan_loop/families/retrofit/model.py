"""Retrofitted models: a dense model's layers, a span of them looped, with parts that help it.

    e = prelude(embed(x)),   x_1 = e
    g = the core's layers
    h_r = x_r + (g(x_r) − x_r) / K,   x_{r+1} = h_r, or h_r + W RMSNorm(e) with a bridge
    logits = head(norm(coda(h_R)))

| symbol | code |
|---|---|
| K | `model.damping`: steps that make one pass through the core; 1 is the whole pass |
| W | `Bridge` (`bridge.py`), with `model.bridge` |
| A [h; e] in place of x | `Mixer` (`bridge.py`), with `model.mixer`; h_0 with `model.start_noise` |
| adapters of g | `adapters.py`, with `model.adapter_rank` |

With K = 1 and R = 1 this is the dense model that it was made from, unless layers were dropped or
tied. Without bridge, mixer, damping and adapters it is family `nanbeige`, which `plain` retrofits
become.

Sources: Shapiro 2026, arXiv 2608.11233 (bridge); arXiv 2605.23872 (damped steps of a trained
model).
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from titan_loop.bounds import FINITE
from titan_loop.errors import UserError
from titan_loop.families.retrofit.adapters import (
    ADAPTERS,
    AdaptedBlock,
    AdapterSets,
    adapted_block,
)
from titan_loop.families.retrofit.bridge import (
    Bridge,
    Mixer,
    Noise,
    bridge_config,
    read_one,
)
from titan_loop.models.block import DenseBlock
from titan_loop.models.context import LoopContext
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.decoder_costs import Flops
from titan_loop.models.dense import BlockOptions, dense_config
from titan_loop.models.family import RUNTIME_OPTIONS, Family, FamilyName, ModelSize, require_usual
from titan_loop.models.injection import Injected
from titan_loop.models.llama import LLAMA_SIZES
from titan_loop.models.parameter_groups import ParameterGroup
from titan_loop.models.recurrence import Carry
from titan_loop.models.units import Unit

Trained: TypeAlias = Literal["all", "core", "new"]
"""The parameters that train."""


@dataclass(kw_only=True, slots=True)
class RetrofitOptions(BlockOptions):
    """Options of retrofitted models; `titan-loop retrofit` makes the first checkpoint."""

    family: FamilyName = field(default="retrofit", init=False)

    bridge: bool = False
    """Whether every step but the first reads the prelude's output again, through a projection."""

    mixer: bool = False
    """Whether every step reads state and prelude's output side by side, through a linear map."""

    start_noise: Annotated[float, Ge(0), FINITE] = 0.0
    """σ of the noise in which the mixer's state starts; 0 starts at the prelude's output."""

    damping: Annotated[int, Ge(1)] = 1
    """K, the number of steps that make one pass through the looped layers: each moves the state
    1/K of the way."""

    adapter_rank: Annotated[int, Ge(0)] = 0
    """Rank of the adapters beside every matrix of the looped layers; 0 for none."""

    adapter_sets: Annotated[int, Ge(1)] = 1
    """Number of sets of adapters, each for one step; later steps use the last."""

    adapter_first_step: Annotated[int, Ge(1)] = 1
    """The first step with adapters; earlier ones run the layers as they are."""

    trained: Trained = "all"
    """Parameters that train: all, core (looped layers and new parameters), or new (those alone)."""

    new_rate_factor: Annotated[float, Gt(0), FINITE] = 1.0
    """Factor on the scheduled learning rate for parameters that the dense model does not have."""


class RetrofitDecoder(LoopDecoder):
    """A looped decoder of dense blocks with the parts that a retrofit adds."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoopDecoder.Config):
        """The added parts."""

        bridge: Bridge.Config | None
        mixer: Mixer.Config | None
        noise: Noise.Config | None
        damping: int
        adapters: AdapterSets | None
        trained: Trained
        new_rate_factor: float

        def set_layer_sharding(self, layer: Any, *, enable_sp: bool) -> None:
            """Declare the placements of one layer and of its adapters."""
            LoopDecoder.Config.set_layer_sharding(self, layer, enable_sp=enable_sp)
            if isinstance(layer, AdaptedBlock.Config):
                for linear in layer.adapted:
                    linear.place_adapters()

        def set_sharding(self, *, enable_sp: bool) -> None:
            """Declare placements, also for the added parts."""
            LoopDecoder.Config.set_sharding(self, enable_sp=enable_sp)
            for part in (self.bridge, self.mixer):
                if part is not None:
                    part.set_sharding(enable_sp=enable_sp)

        @property
        def whole_visits(self) -> bool:
            """As in the base class: adapters are told the step."""
            return self.adapters is None

        @property
        def keeps_prelude(self) -> bool:
            """Whether the carry has the prelude's output beside the state."""
            return self.bridge is not None or self.mixer is not None

        def reaches_start(self, recurrent_steps: float, reached: float) -> bool:
            """As in the base class; bridge and mixer reach the prelude from every step."""
            inherited = LoopDecoder.Config.reaches_start(self, recurrent_steps, reached)
            return inherited or (reached > 0 and self.keeps_prelude)

        def own_flops(self, flops: Flops, recurrent_steps: float, reached: float) -> Flops:
            """As in the base class, with adapters and bridge, and less where weights are frozen."""
            matrices, between, loop = flops.matrices, recurrent_steps - 1, len(self.looped)
            if self.adapters is not None:
                elements = self.layers[self.looped.start].adapter_elements
                adapted = max(0, recurrent_steps - self.adapters.first_step + 1)
                matrices += loop * elements * (2 * adapted + 4 * min(adapted, reached))
            if self.bridge is not None:
                matrices += self.dim**2 * (2 * between + 4 * min(between, reached))
            if self.mixer is not None:
                matrices += 2 * self.dim**2 * (2 * recurrent_steps + 4 * reached)
            if self.trained == "all" or not reached:
                return flops._replace(matrices=matrices)
            # A frozen layer passes gradients on, at half the price, back to what trains first.
            visits = self.layer_visits(recurrent_steps, reached)
            start = self.prelude_layers * self.reaches_start(recurrent_steps, reached)
            skipped = 4 * start
            frozen = skipped + 2 * (visits.backward - reached * loop - start)
            if self.trained == "new":
                before = 0 if self.mixer is not None else 1 if self.bridge is not None else math.inf
                if self.adapters is not None:
                    before = min(before, self.adapters.first_step - 1)
                passed = min(reached, max(0, recurrent_steps - before))
                skipped += 4 * (reached - passed) * loop
                frozen += (4 * reached - 2 * passed) * loop
                reached = passed
            matrices -= frozen * self.layers[0].matrix_elements
            attention = flops.attention * (1 - skipped / (2 * visits.forward + 4 * visits.backward))
            read = recurrent_steps if self.exit_gate is not None else 1
            readouts = 2 * (read + min(read, reached)) * self.dim * self.vocab_size
            return flops._replace(matrices=matrices, attention=attention, readouts=readouts)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.bridge = None if config.bridge is None else config.bridge.build()
        self.mixer = None if config.mixer is None else config.mixer.build()
        self.noise = None if config.noise is None else config.noise.build()
        self.tells_step = config.adapters is not None
        if config.trained != "all":
            core = tuple(f"layers.{index}." for index in config.looped)
            for name, parameter in self.named_parameters():
                trains = is_new(name) or (config.trained == "core" and name.startswith(core))
                parameter.requires_grad_(trains)

    def start(self, tokens: Tensor, context: LoopContext) -> Carry:
        """Return the prelude's output; where steps read it, the initial state and that output."""
        prelude_BLD = super().start(tokens, context)
        if not self.config.keeps_prelude:
            return prelude_BLD
        return Injected(prelude_BLD if self.noise is None else self.noise(prelude_BLD), prelude_BLD)

    def input(self, carry: Carry, context: LoopContext) -> Tensor:
        if self.mixer is not None:
            return self.mixer(*carry)
        return carry if self.bridge is None else carry.hidden_BLD

    def step(self, carry: Carry, step: int | Tensor, context: LoopContext) -> Tensor:
        """Return the state after a step; with damping it goes 1/K of the way through the core."""
        passed_BLD = super().step(carry, step, context)
        if self.config.damping == 1:
            return passed_BLD
        return torch.lerp(self.input(carry, context), passed_BLD, 1 / self.config.damping)

    def advance(
        self, carry: Carry, hidden_BLD: Tensor, step: int | Tensor, context: LoopContext
    ) -> Carry:
        if not self.config.keeps_prelude:
            return hidden_BLD
        if self.bridge is not None:
            hidden_BLD = self.bridge(hidden_BLD, carry.embedding_BLD)
        return carry._replace(hidden_BLD=hidden_BLD)

    def units(self) -> list[Unit]:
        units = super().units()
        if self.bridge is not None:
            units.append(Unit("bridge", (self.bridge,), place="between"))
        if self.mixer is not None:
            units.append(Unit("mixer", (self.mixer,)))
        return units

    def parameter_group(self, name: str, parameter: Tensor) -> ParameterGroup:
        """As in the base class, with the new parameters' own rate."""
        group = super().parameter_group(name, parameter)
        factor = self.config.new_rate_factor
        return replace(group, rate_factor=group.rate_factor * factor) if is_new(name) else group


def is_new(name: str) -> bool:
    """Return whether the dense model lacks a parameter."""
    return name.startswith(("bridge.", "mixer.", "exit_gate.")) or name.endswith(ADAPTERS)


def decoder_config(
    options: RetrofitOptions, shape: ModelSize, max_seq_len: int
) -> RetrofitDecoder.Config:
    """Return the architecture; arguments as in `Family.decoder_config`."""
    problem = "does not fit: a retrofitted loop reads its prelude through model.bridge"
    require_usual(options, ("injection",), problem)
    adapters = _adapters(options, shape)
    if options.mixer:
        problem = "does not fit model.mixer=True, which reads the prelude at every step"
        require_usual(options, ("bridge", "damping"), problem)
    else:
        require_usual(options, ("start_noise",), "has no effect without model.mixer")
    parts = (adapters is not None, options.bridge, options.mixer)
    if options.trained == "new" and not any(parts):
        raise UserError(
            "model.trained=new: there is neither bridge nor mixer nor adapter; use core or all"
        )
    if not any((*parts, options.exit_gate)):
        problem = "has no effect: there is neither bridge nor mixer nor adapter nor exit gate"
        require_usual(options, ("new_rate_factor",), problem)
    noise = Noise.Config(std=options.start_noise) if options.start_noise else None
    # The mixer's first step passes the prelude on, even if the state is noise.
    reads = {"weight": partial(read_one, prelude=noise is not None)}
    config = dense_config(
        RetrofitDecoder.Config,
        options,
        shape,
        max_seq_len,
        bridge=bridge_config(shape.dim, options.norm_eps) if options.bridge else None,
        mixer=Mixer.Config(dim=shape.dim, param_init=reads) if options.mixer else None,
        noise=noise,
        damping=options.damping,
        adapters=adapters,
        trained=options.trained,
        new_rate_factor=options.new_rate_factor,
    )
    if adapters is not None:
        for index in config.looped:
            layer = config.layers[index]
            assert isinstance(layer, DenseBlock.Config)
            config.layers[index] = adapted_block(layer, adapters)
    return config


def _adapters(options: RetrofitOptions, shape: ModelSize) -> AdapterSets | None:
    adapters = AdapterSets(options.adapter_rank, options.adapter_sets, options.adapter_first_step)
    if adapters.rank > shape.dim:
        raise UserError(f"model.adapter_rank={adapters.rank} is more than the width, {shape.dim}")
    if adapters.rank:
        return adapters
    problem = "has no effect with model.adapter_rank=0"
    require_usual(options, ("adapter_sets", "adapter_first_step"), problem)
    return None


RETROFIT = Family(
    name="retrofit",
    options=RetrofitOptions,
    sizes=LLAMA_SIZES,
    decoder_config=decoder_config,
    runtime_options=RUNTIME_OPTIONS | {"new_rate_factor", "trained"},
    uses=frozenset({"analyse", "export", "generate", "held_out"}),
)
