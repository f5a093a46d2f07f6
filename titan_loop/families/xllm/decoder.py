"""Prelude, recurrent core and coda of Llama's blocks; the core has one state or two.

    e = prelude(embed(x)), or its norm            h_0 = noise, zeros or e
    one state   h_r = core(inject(h_{r−1}, e))                          r = 1 … R
    H and L     z_H = e,  z_L = h_0;  in each of R high cycles
                T times:  z_L ← core_L(inject(z_L + z_H, e))
                z_H ← core_H(inject(z_H + z_L, e))
    logits = head(norm(coda(h_R or z_H)))

core_H and core_L are the same layers (shared), or the first and the second half of the looped
layers (split); an update may run its layers several times. A high cycle is one recurrent step. With
K untied steps the looped layers form K equal parts, each preceded by an injection: the paper's
control without shared weights.

Source: Huang et al. 2026 (xLLM-Loop), arXiv 2610.06833, and their code.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
from torch import Tensor
from torchtitan.models.common.decoder_sharding import norm_config
from torchtitan.models.common.nn_modules import RMSNorm

from titan_loop.families.xllm.injection import LinearInjection
from titan_loop.families.xllm.start_state import StartState
from titan_loop.models.context import LoopContext
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.decoder_costs import Flops, LayerVisits
from titan_loop.models.final_norm import FinalNorm
from titan_loop.models.injection import Injected
from titan_loop.models.parameter_groups import ParameterGroup
from titan_loop.models.recurrence import Carry
from titan_loop.models.sharding import mixed_states
from titan_loop.models.units import NORM_AND_GATE, Unit

States: TypeAlias = Literal["one", "shared", "split"]


class Hierarchy(NamedTuple):
    """z_H and z_L, (B, L, D) each."""

    high_BLD: Tensor
    low_BLD: Tensor


class Update(NamedTuple):
    """One update of a state: the layers that it runs, and whether it updates z_L."""

    layers: range
    is_low: bool


class XllmDecoder(LoopDecoder):
    """A looped decoder of Llama's blocks; every update can read the prelude's output again."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoopDecoder.Config):
        """Start, states and norms of the loop."""

        start_state: StartState.Config
        states: States
        low_cycles: int
        core_passes: int
        untied_steps: int
        prelude_norm: FinalNorm.Config | None
        state_norm: RMSNorm.Config | None

        @property
        def updates(self) -> list[Update]:
            """The updates of one recurrent step, in order."""
            core, half = self.looped, len(self.looped) // 2
            if self.states == "one":
                part = len(core) // self.untied_steps
                starts = range(core.start, core.stop, part)
                return [Update(range(start, start + part), False) for start in starts]
            high = low = core
            if self.states == "split":
                high, low = core[:half], core[half:]
            return [*[Update(low, True)] * self.low_cycles, Update(high, False)]

        @property
        def visits(self) -> int:
            """Layers visited in one recurrent step."""
            return self.core_passes * sum(len(update.layers) for update in self.updates)

        @property
        def draws(self) -> bool:
            """As in the base class; a normal start state is drawn, too."""
            drawn = self.start_state.kind == "normal"
            return drawn or any(layer.dropout for layer in self.layers)

        def set_sharding(self, *, enable_sp: bool) -> None:
            """As in the base class; injection and norms get the placements of the states."""
            LoopDecoder.Config.set_sharding(self, enable_sp=enable_sp)
            if self.injection is not None:
                self.injection.sharding_config = mixed_states(
                    "hidden_BLD",
                    "embedding_BLD",
                    weights=tuple(self.injection.param_init or ()),
                    enable_sp=enable_sp,
                )
            for norm in (self.prelude_norm, self.state_norm):
                if norm is not None:
                    norm.sharding_config = norm_config(enable_sp=enable_sp)

        def layer_visits(
            self, recurrent_steps: float, backward_steps: float | None = None
        ) -> LayerVisits:
            """As in the base class, but a step visits a layer once per pass of every update."""
            visits = LoopDecoder.Config.layer_visits(self, recurrent_steps, backward_steps)
            reached = recurrent_steps
            if backward_steps is not None:
                reached = min(reached, backward_steps)
            more = self.visits - len(self.looped)
            return LayerVisits(
                visits.forward + recurrent_steps * more, visits.backward + reached * more
            )

        def own_flops(self, flops: Flops, recurrent_steps: float, reached: float) -> Flops:
            """As in the base class, with the injection's matrix at every update."""
            if self.injection is None:
                return flops
            elements = self.dim**2 * (1 + isinstance(self.injection, LinearInjection.Config))
            added = len(self.updates) * elements * (2 * recurrent_steps + 4 * reached)
            return flops._replace(matrices=flops.matrices + added)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.start_state = config.start_state.build()
        self.prelude_norm = None if config.prelude_norm is None else config.prelude_norm.build()
        self.state_norm = None if config.state_norm is None else config.state_norm.build()

    def start(self, tokens: Tensor, context: LoopContext) -> Carry:
        """Return the carry of step 1: one or two start states, and e."""
        carry = super().start(tokens, context)
        prelude_BLD = carry if self.injection is None else carry.embedding_BLD
        if self.prelude_norm is not None:
            prelude_BLD = self.prelude_norm(prelude_BLD)
        first_BLD = self.start_state(prelude_BLD, context.positions_BL)
        state = first_BLD if self.config.states == "one" else Hierarchy(prelude_BLD, first_BLD)
        return Injected(state, prelude_BLD)  # type: ignore[arg-type]  two states

    def step(self, carry: Carry, step: int | Tensor, context: LoopContext) -> Any:
        """Return the state after all updates of a step; a `Hierarchy` where there are two."""
        state, prelude_BLD = carry
        visited = 0  # the cache has one slot per layer visit of a step, in order
        for layers, is_low in self.config.updates:
            x_BLD = state.high_BLD + state.low_BLD if isinstance(state, Hierarchy) else state
            if self.injection is not None:
                x_BLD = self.injection(x_BLD, prelude_BLD)
            for _ in range(self.config.core_passes):
                x_BLD = self._visit(layers, x_BLD, context, step, visited - layers.start)
                visited += len(layers)
            if self.state_norm is not None:
                x_BLD = self.state_norm(x_BLD)
            if isinstance(state, Hierarchy):
                state = state._replace(**{"low_BLD" if is_low else "high_BLD": x_BLD})
            else:
                state = x_BLD
        return state

    def advance(
        self, carry: Carry, hidden_BLD: Any, step: int | Tensor, context: LoopContext
    ) -> Carry:
        return carry._replace(hidden_BLD=hidden_BLD)

    def read(
        self, hidden_BLD: Any, context: LoopContext, step: int | Tensor | None = None
    ) -> Tensor:
        """As in the base class; reads z_H where there are two states."""
        if isinstance(hidden_BLD, Hierarchy):
            hidden_BLD = hidden_BLD.high_BLD
        return super().read(hidden_BLD, context, step)

    def units(self) -> list[Unit]:
        """As in the base class, but the injection is a unit of its own.

        Its matrix then runs in the compute dtype; the base class puts it in the fp32 unit of norms.
        """
        units = []
        for unit in super().units():
            modules = tuple(part for part in unit.modules if part is not self.injection)
            if unit.name == NORM_AND_GATE and self.prelude_norm is not None:
                modules += (self.prelude_norm,)
            units.append(unit._replace(modules=modules))
        if self.injection is not None:
            units.append(Unit("injection", (self.injection,)))
        return units

    def cache_slots(self, recurrent_steps: int) -> tuple[int, int, int]:
        """As in the base class, with one slot for every layer visit of a step."""
        steps, _, others = super().cache_slots(recurrent_steps)
        return steps, self.config.visits, others

    def parameter_group(self, name: str, parameter: Tensor) -> ParameterGroup:
        """As in the base class; all parameters of an injection decay, as in the authors' code."""
        group = super().parameter_group(name, parameter)
        if name.startswith("injection."):
            return replace(group, decays=True)
        return group
