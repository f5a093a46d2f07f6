"""A looped decoder of Llama's blocks, some of them with experts; it counts and balances their load.

    layer:  x ← x + attention(n1(x)),   x ← x + experts(n2(x))

Loads are counted in the forward pass of training, once per visit: layers that activation
checkpointing computes again are not counted again. The bias that balances the loads moves once per
optimiser update, by the loads of all its visits, micro-batches and ranks.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import spmd_types as spmd
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.protocols.module import ModuleDict

from titan_loop.errors import UserError
from titan_loop.families.moe.attention import StepAttention
from titan_loop.families.moe.feed_forward import ALIGNED, LoopMoE, Routing
from titan_loop.models.block import DenseBlock
from titan_loop.models.context import CacheSlot, LoopContext
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.decoder_costs import Flops
from titan_loop.models.joined import Joined
from titan_loop.models.output import LoopOutput
from titan_loop.models.parameter_groups import ParameterGroup
from titan_loop.models.sharding import set_attention_sharding, state_placement
from titan_loop.models.units import Unit, with_experts


class Visit(NamedTuple):
    """One visit of a sparse layer; `step` is None outside the loop, `layer` counts from 0."""

    layer: int
    step: int | None
    routing: Routing


class MoEBlock(DenseBlock):
    """A pre-norm block whose feed-forward is a mixture of experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(DenseBlock.Config):
        """Attention, mixture (`moe`) and the norms before them."""

        @property
        def matrix_elements(self) -> int:
            """Number of weights that a token is multiplied by."""
            assert isinstance(self.moe, LoopMoE.Config)
            return self.attention_elements + self.moe.active_elements

    def __init__(self, config: Config) -> None:
        TransformerBlock.__init__(self)
        assert isinstance(config.moe, LoopMoE.Config)
        assert config.attention_norm is not None
        assert config.ffn_norm is not None
        self.attention_norm = config.attention_norm.build()
        self.attention = config.attention.build()
        self.ffn_norm = config.ffn_norm.build()
        self.moe = config.moe.build()
        self.dropout = None if config.dropout is None else config.dropout.build()
        self.branch_scale = config.branch_scale

    def forward(  # type: ignore[override]
        self, x_BLD: Tensor, context: LoopContext, cache_slot: CacheSlot | None = None
    ) -> tuple[Tensor, Routing]:
        x_BLD = x_BLD + self._kept(self.attention(self.attention_norm(x_BLD), context, cache_slot))
        step = None if cache_slot is None else cache_slot.step
        mixed_BLD, routing = self.moe(self.ffn_norm(x_BLD), step)
        if isinstance(x_BLD, DTensor):  # upstream's wrapper places single results alone
            mixed_BLD = mixed_BLD.redistribute(placements=x_BLD.placements)
        return x_BLD + self._kept(mixed_BLD), routing


class SparseConfig(LoopDecoder.Config):
    """The parts of a config that every decoder with experts has; a mix-in without slots.

    Attributes:
        dense_hidden_dim: Width F of a dense feed-forward, whether there is one or not.
        bias_rate: Change of an expert's bias in a training step.
    """

    __slots__ = ()

    dense_hidden_dim: int
    bias_rate: float
    expert_parallel: bool

    @property
    def whole_visits(self) -> bool:
        """As in the base class: experts are not compiled."""
        return False

    def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
        """As in the base class; experts are placed by the degree of expert parallelism."""
        self.expert_parallel = config.parallelism.expert_parallel_degree > 1
        super().update_from_config(config=config, **kwargs)

    def set_layer_sharding(self, layer: Any, *, enable_sp: bool) -> None:
        """Declare a layer's placements; experts are spread over ranks, or kept whole."""
        super().set_layer_sharding(layer, enable_sp=enable_sp)
        if isinstance(layer.attention, StepAttention.Config):
            set_attention_sharding(layer.attention.later, enable_sp=enable_sp)
            layer.attention.later.sharding_config = None  # its input is gathered already
        if layer.moe is not None:
            cut: dict[str, Any] = {
                "w1_EFD": spmd.S(1),
                "w2_EDF": spmd.S(2),
                "w3_EFD": spmd.S(1),
            }
            set_moe_sharding_config(
                layer.moe,
                enable_ep=self.expert_parallel,
                enable_sp=True,
                expert_param_layout=cut,
            )
            placed = layer.moe.sharding_config
            placed.state_shardings["expert_bias_SE"] = placed.state_shardings["expert_bias_E"]
            layer.moe.sharding_config = replace(
                placed, in_src_shardings={"x_BLD": state_placement(enable_sp)}
            )

    @property
    def hidden_dim(self) -> int:
        """Width F of a dense feed-forward, whether there is one or not."""
        return self.dense_hidden_dim

    @property
    def sparse(self) -> dict[int, LoopMoE.Config]:
        """The mixtures, by the number of their layer."""
        layers = enumerate(self.layers)
        return {index: layer.moe for index, layer in layers if layer.moe is not None}

    @property
    def experts_per_active(self) -> float:
        """Routed experts over those that a token chooses."""
        mixture = next(iter(self.sparse.values()))
        return mixture.num_experts / mixture.router.top_k

    def idle_parameters(self, *, looped: bool = False) -> int:
        """Return the number of parameters, or looped ones, in experts that a token skips."""
        return sum(
            mixture.idle_elements
            for index, mixture in self.sparse.items()
            if index in self.looped or not looped
        )

    @property
    def aux(self) -> tuple[str, ...]:
        """Balance and z of the routers."""
        return ("balance", "router_z")

    def check_spreading(
        self, *, tensor_parallel: int, context_parallel: int, expert_parallel: int
    ) -> None:
        """Refuse degrees that do not divide experts, their width or windows."""
        mixture = next(iter(self.sparse.values()))
        experts, width = mixture.num_experts, mixture.routed_experts.inner_experts.hidden_dim
        if experts % expert_parallel:
            raise UserError(
                f"parallelism.expert_parallel_degree={expert_parallel} must divide "
                f"model.experts={experts}"
            )
        if expert_parallel == 1 and width % (ALIGNED * tensor_parallel):
            raise UserError(
                f"parallelism.tensor_parallel_degree={tensor_parallel} must cut "
                f"model.expert_hidden_dim={width} into multiples of {ALIGNED}; spread experts "
                "whole with parallelism.expert_parallel_degree"
            )
        if self.max_seq_len % tensor_parallel:
            raise UserError(
                f"parallelism.tensor_parallel_degree={tensor_parallel} must divide "
                f"training.seq_len={self.max_seq_len}: ranks route parts of a window"
            )
        if context_parallel != 1:
            raise UserError(
                f"parallelism.context_parallel_degree={context_parallel} does not work with "
                "experts; leave it at 1"
            )


class MoEDecoder(LoopDecoder):
    """The looped decoder whose layers may have experts.

    Attributes:
        loads: Number of tokens, over all ranks, that chose each expert in the last training step,
            by (layer, step); layers count from 0, and the step is None outside the loop.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SparseConfig):
        """Dense and sparse layers."""

        dense_hidden_dim: int
        bias_rate: float
        expert_parallel: bool = False

        def own_flops(self, flops: Flops, recurrent_steps: float, reached: float) -> Flops:
            """As in the base class; only the experts that a token chooses count."""
            prelude, looped, coda = self.visits_by_place(recurrent_steps, reached)
            places = [
                *[prelude] * self.prelude_layers,
                *[looped] * len(self.looped),
                *[coda] * self.coda_layers,
            ]
            matrices = sum(
                (2 * visits.forward + 4 * visits.backward) * layer.matrix_elements
                for visits, layer in zip(places, self.layers, strict=True)
            )
            return flops._replace(matrices=matrices)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.tells_step = any(
            (layer.moe is not None and layer.moe.routers > 1)
            or isinstance(layer.attention, StepAttention.Config)
            for layer in config.layers
        )
        self.loads: dict[tuple[int, int | None], Tensor] = {}
        self._counted: dict[tuple[int, int | None], Tensor] = {}
        self._visits: list[Visit] | None = None

    def forward(self, *args: Any, **named: Any) -> LoopOutput:
        """Run R recurrent steps; arguments as in the base class.

        Returns:
            The states. Aux holds means over the visits of sparse layers: `balance` of each window
            (B,), and `router_z` of each token (B, L).
        """
        self._visits = []
        try:
            output = super().forward(*args, **named)
        finally:
            visits, self._visits = self._visits, None
        if self.training and torch.is_grad_enabled():
            for visit in visits:
                key = visit.layer, visit.step
                load_E = visit.routing.load_E
                self._counted[key] = self._counted[key] + load_E if key in self._counted else load_E
        aux = {
            "balance": torch.stack([visit.routing.balance_B for visit in visits]).mean(0),
            "router_z": torch.stack([visit.routing.z_BL for visit in visits]).mean(0),
        }
        return output._replace(aux=aux)

    def visit_layer(
        self,
        index: int,
        hidden_BLD: Tensor,
        context: LoopContext,
        slot: CacheSlot | None,
        step: int | Tensor | None,
        **joined: Joined,
    ) -> Tensor:
        """Apply a layer, and note its routing while a forward pass asks for it."""
        result: Any = super().visit_layer(index, hidden_BLD, context, slot, step, **joined)
        if index not in self.config.sparse:
            return result
        hidden_BLD, routing = result
        if self._visits is not None:
            assert not isinstance(step, Tensor)
            self._visits.append(Visit(index, step, routing))
        return hidden_BLD

    @torch.no_grad()
    def after_update(self, mesh: DeviceMesh | None, updated: Tensor) -> None:
        """Count the step's loads over all ranks, and balance the experts by them."""
        counted, self._counted = self._counted, {}
        keys = sorted(counted, key=lambda key: (key[0], key[1] or 0))  # the same on all ranks
        loads_VE = torch.stack([counted[key] for key in keys])
        if mesh is not None:
            dist.all_reduce(loads_VE, group=mesh.get_group())
        self.loads = dict(zip(keys, loads_VE.unbind(), strict=True))
        for index in self.config.sparse:
            mixture = self.get_submodule(f"layers.{index}.moe")
            assert isinstance(mixture, LoopMoE)
            load_SE: dict[int, Tensor] = defaultdict(lambda: loads_VE.new_zeros(loads_VE.shape[1]))
            routers = len(mixture.expert_bias_SE)
            for (layer, step), load_E in self.loads.items():
                if layer == index:
                    load_SE[min(step or 1, routers) - 1] += load_E
            stacked_SE = torch.stack([load_SE[number] for number in range(routers)])
            mixture.balance(stacked_SE, self.config.bias_rate * updated)

    def record(self) -> Mapping[str, Any]:
        """Return loads by layer and step, numbered from 1, each over the mean load of its visit.

        | key | meaning |
        |---|---|
        | `experts/load/layer_2_step_1` | load of each expert over the mean, a list |
        | `experts/load/layer_1` | the same of a layer outside the loop |
        | `experts/max_load` | the largest of all |
        | `experts/unused` | number of (visit, expert) that no token chose |
        """
        entries: dict[str, Any] = {}
        for (layer, step), load_E in self.loads.items():
            name = f"experts/load/layer_{layer + 1}" + ("" if step is None else f"_step_{step}")
            entries[name] = (load_E / load_E.float().mean()).tolist()
        shares = [share for shares in entries.values() for share in shares]
        return entries | {
            "experts/max_load": max(shares),
            "experts/unused": sum(share == 0 for share in shares),
        }

    def compiled_parts(self) -> nn.Module:
        """Return dense layers, and the attention of sparse ones: experts are not compiled."""
        parts, layers = nn.Module(), dict[str, Any](self.layers.items())
        parts.layers = ModuleDict(
            {
                name: layer.attention if int(name) in self.config.sparse else layer
                for name, layer in layers.items()
            }
        )
        return parts

    def parameter_group(self, name: str, parameter: Tensor) -> ParameterGroup:
        """Return a parameter's treatment by optimisers: experts' matrices are hidden ones."""
        group = super().parameter_group(name, parameter)
        if ".inner_experts." in name:
            return replace(group, is_hidden_matrix=True, width_ratio=self.config.width_ratio)
        return replace(group, is_hidden_matrix=False) if ".gate.weight" in name else group

    def units(self) -> list[Unit]:
        """List the units: a layer's experts form a unit of their own, after the rest of it."""
        sparse = [self.layers[str(index)] for index in self.config.sparse]
        return with_experts(super().units(), sparse)
