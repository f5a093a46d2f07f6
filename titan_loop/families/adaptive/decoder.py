"""A decoder whose layers loop, each as often as it decides, and read memory banks.

    h ← layer_ℓ(h, banks),   ℓ = 1 … N,   read(h) = norm(h)

The recurrence is in `layer.py`, so the stack is applied once. A cache has a slot for every layer
and iteration. Only blocks are compiled; loops, routers, gates and banks are not. The bank that all
layers share is a unit of its own, gathered once and read by every layer.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common.nn_modules import Identity
from torchtitan.protocols.module import ModuleDict
from torchtitan.protocols.sharding import ShardingConfig

from titan_loop.errors import UserError
from titan_loop.families.adaptive.layer import LayerReport
from titan_loop.families.adaptive.memory_bank import MemoryBank
from titan_loop.models.context import AttentionMask, CacheSlot, LoopContext
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.decoder_costs import Flops, LayerVisits
from titan_loop.models.gpt2_block import GPT2Decoder, layer_norm_sharding
from titan_loop.models.output import Collect, LoopOutput
from titan_loop.models.parameter_groups import ParameterGroup
from titan_loop.models.recurrence import Carry
from titan_loop.models.sharding import gathered_state, mixed_states
from titan_loop.models.units import Unit

CONTROL, BANK = "router, scales, gates", "global bank"
_CONTROLS = (".control.", ".gates.")


class AdaptiveDecoder(GPT2Decoder):
    """A decoder whose layers loop and read memory."""

    @dataclass(kw_only=True, slots=True)
    class Config(GPT2Decoder.Config):
        """Adaptive layers, and the bank that they share."""

        most_steps: ClassVar[int | None] = 1

        bank: MemoryBank.Config | None = None
        report_gather: Identity.Config = field(default_factory=Identity.Config)
        decay_controls: bool = False

        @property
        def whole_visits(self) -> bool:
            """As in the base class: a layer decides how often it runs."""
            return False

        @property
        def aux(self) -> tuple[str, ...]:
            """The layers' iterations, if a layer may run more than one."""
            return ("iterations",) if self.layers[0].iterations > 1 else ()

        def set_sharding(self, *, enable_sp: bool) -> None:
            """Shard blocks like GPT-2's; loops, memory and gates do not move tokens."""
            GPT2Decoder.Config.set_sharding(self, enable_sp=enable_sp)
            self.report_gather.sharding_config = gathered_state(enable_sp=enable_sp)
            if self.bank is not None:
                self.bank.sharding_config = _bank_sharding(enable_sp)

        def set_layer_sharding(self, layer: Any, *, enable_sp: bool) -> None:
            """Declare a layer's placements."""
            GPT2Decoder.Config.set_layer_sharding(self, layer.block, enable_sp=enable_sp)
            if layer.loop_norm is not None:
                layer.loop_norm.sharding_config = layer_norm_sharding(enable_sp)
            if layer.control is not None:
                layer.control.sharding_config = mixed_states(
                    "hidden_BLD",
                    "branch_BLD",
                    weights=("scale", "weight", "step_weight", "bias"),
                    enable_sp=enable_sp,
                )
                layer.control.sharding_config.out_src_shardings = None  # several tensors
            if layer.bank is not None:
                layer.bank.sharding_config = _bank_sharding(enable_sp)
            for reader in layer.readers:
                reader.sharding_config = mixed_states(
                    "hidden_BLD", weights=("query_gain", "output"), enable_sp=enable_sp
                )
            if layer.gates is not None:
                layer.gates.sharding_config = mixed_states(
                    "hidden_BLD", weights=("weight", "bias"), enable_sp=enable_sp
                )
                layer.gates.sharding_config.out_src_shardings = None

        def layer_visits(
            self, recurrent_steps: float, backward_steps: float | None = None
        ) -> LayerVisits:
            """Return the iterations of all layers; arguments as in the base class."""
            visits = LoopDecoder.Config.layer_visits(self, recurrent_steps, backward_steps)
            return LayerVisits(*(self.layers[0].iterations * count for count in visits))

        def own_flops(self, flops: Flops, recurrent_steps: float, reached: float) -> Flops:
            """As in the base class, with the matrix products of memory."""
            banks = [bank for layer in self.layers for bank in layer.banks]
            memory = (2 + 4 * reached) * sum(bank.matrix_elements for bank in banks)
            return flops._replace(matrices=flops.matrices + memory)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.bank = None if config.bank is None else config.bank.build()
        self.report_gather = config.report_gather.build()

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention_masks: AttentionMask | None = None,
        *,
        recurrent_steps: int | None = None,
        backward_steps: int | None = None,
        collect: Collect = "all",
        columns: Any = None,
    ) -> LoopOutput:
        """Run all layers over whole windows; arguments as in the base class, with R = 1.

        Returns:
            The last state. For the parts that the model has, `aux` holds each layer's E[n] as
            `iterations`, (N, B, L), with a gradient; its softplus(α_t) as `scales`, (N, N_max); and
            its gates as `local_gates` and `global_gates`, (N, B, L).
        """
        self._check_steps(self.recurrent_steps if recurrent_steps is None else recurrent_steps)
        context = self.make_context(tokens, positions, attention_masks, columns=columns)
        carry = self.start(tokens, context)
        hidden_BLD, said = self.recurrence.wrapped(self._through_layers)(carry, context)
        gathered_BLD = self.state_gather(self.read(hidden_BLD, context))
        return LoopOutput((gathered_BLD,), (), aux=self._aux(said))

    def step(self, carry: Carry, step: int | Tensor, context: LoopContext) -> Tensor:
        return self._through_layers(carry, context)[0]

    def _through_layers(
        self, hidden_BLD: Tensor, context: LoopContext
    ) -> tuple[Tensor, tuple[LayerReport, ...]]:
        """Return the state after the last layer, in the input's dtype, and each layer's report."""
        dtype, iterations = hidden_BLD.dtype, self.config.layers[0].iterations
        said = []
        for index, layer in enumerate(self.layers.values()):
            # Without a cache the slots stay None, or compiled blocks would specialise on them.
            numbers = range(index * iterations, (index + 1) * iterations)
            slots = tuple(None if context.cache is None else CacheSlot(1, n) for n in numbers)
            hidden_BLD, report = layer(hidden_BLD, context, slots, self.bank)
            said.append(report)
        return hidden_BLD.to(dtype), tuple(said)

    def _aux(self, said: tuple[LayerReport, ...]) -> dict[str, Tensor]:
        aux: dict[str, Tensor] = {}
        iterations = [report.iterations_BL1 for report in said if report.iterations_BL1 is not None]
        if iterations:
            aux["iterations"] = _stacked([self.report_gather(x_BL1) for x_BL1 in iterations])
        if said[0].scales:
            aux["scales"] = torch.stack([_stacked(report.scales) for report in said])
        names = [
            name
            for name, bank in (("local", self.config.layers[0].bank), ("global", self.bank))
            if bank is not None
        ]
        for number, name in enumerate(names):
            gates = [self.report_gather(report.gates[number]) for report in said]
            aux[f"{name}_gates"] = _stacked(gates)
        return aux

    def _check_steps(self, recurrent_steps: int) -> None:
        if recurrent_steps != 1:
            raise UserError(
                f"recurrent_steps={recurrent_steps}: model.family=adaptive loops inside its "
                "layers, not over them; use 1"
            )

    def units(self) -> list[Unit]:
        """List the units: every layer, its fp32 parts, and the shared bank."""
        units = super().units()
        layers: list[Any] = list(self.layers.values())
        for layer in layers:
            units += [
                Unit(CONTROL, (module,), fp32=True, kept=True)
                for module in (layer.control, layer.gates)
                if module is not None
            ]
        if self.bank is not None:
            units.append(Unit(BANK, (self.bank,), kept=True))
        return units

    def compiled_parts(self) -> nn.Module:
        """Return the blocks, the only compiled parts."""
        parts, layers = nn.Module(), dict[str, Any](self.layers.items())
        parts.layers = ModuleDict({name: layer.block for name, layer in layers.items()})
        return parts

    def cache_slots(self, recurrent_steps: int) -> tuple[int, int, int]:
        """Return one step, with a slot for every layer and iteration."""
        self._check_steps(recurrent_steps)
        return 1, sum(layer.iterations for layer in self.config.layers), 0

    def parameter_group(self, name: str, parameter: Tensor) -> ParameterGroup:
        """As in the base class; banks are tables, not Muon's matrices."""
        if any(part in name for part in _CONTROLS):
            return ParameterGroup(decays=self.config.decay_controls)
        if name.endswith(("bank.keys", "bank.values")):
            return ParameterGroup(decays=True)
        return super().parameter_group(name, parameter)


def _stacked(reported: Iterable[Tensor]) -> Tensor:
    """Stack values that are equal on all tensor-parallel ranks, without their last axis of 1."""
    plain = [x.to_local() if isinstance(x, DTensor) else x for x in reported]
    return torch.stack([x.squeeze(-1) for x in plain])  # no view: FSDP cannot hook one safely


def _bank_sharding(enable_sp: bool) -> ShardingConfig:
    return mixed_states("query_BLD", weights=("keys", "values", "key_gain"), enable_sp=enable_sp)
