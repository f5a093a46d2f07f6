"""Inkling: layers that read blocks, and passes that start again and read the pass before.

    layer i, with state h and blocks B:
        x_q, x_k, x_v = over(a_i; B, h)             one query, or three in layers without a window
        u = conv(attention(n(x_q), n(x_k), n(x_v)))
        B ← B, h and r = u      if n_b divides i,   else r = h + u
        h ← r + conv(mixture(n(over(m_i; B, r))))

    prelude(embedding) = h_0, B_0
    pass r:  h_r, B_r = looped layers from (h_0, B_0); every layer's four inputs are gated with
             messages over(q; B_{r−1} without B_0 and h_0, h_{r−1})   from pass 2 on
    read:    n(over(f; coda(h_R, B_R)))

A pass hands on h_r and the blocks that it made, but the first one, which is h_0.

Source: `inkling2_loop` in transformers 5.24.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.module import ModuleDict

from titan_loop.errors import UserError
from titan_loop.families.inkling.attention import InklingAttention
from titan_loop.families.inkling.mixture import Mixture
from titan_loop.families.inkling.parts import (
    BlockAttention,
    MessageGate,
    MessageQueries,
    ShortConvolution,
)
from titan_loop.models.block import DenseBlock
from titan_loop.models.context import CacheSlot, LoopContext
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.decoder_costs import Flops
from titan_loop.models.output import LoopOutput
from titan_loop.models.parameter_groups import ParameterGroup
from titan_loop.models.recurrence import Carry
from titan_loop.models.units import Unit, with_experts

Blocks = tuple[Tensor, ...]
_STREAMS = "qkv"
_MESSAGES = (*_STREAMS, "ffn")


class Handed(NamedTuple):
    """State after a pass, and the next one's carry; (B, L, D) each.

    Attributes:
        hidden_BLD: h_r.
        passed: Blocks that the pass made, but the first.
        before_BLD: h_0.
        before: B_0.
    """

    hidden_BLD: Tensor
    passed: Blocks
    before_BLD: Tensor
    before: Blocks


class InklingBlock(DenseBlock):
    """A layer that reads blocks in place of a residual stream."""

    @dataclass(kw_only=True, slots=True)
    class Config(DenseBlock.Config):
        """`boundary` layers begin a block; looped ones have gates for messages.

        A layer with three `norms_before` reads inputs of its own for q, k and v.
        """

        mixture: Mixture.Config
        norms_before: tuple[RMSNorm.Config, ...]
        attention_input: BlockAttention.Config | None
        ffn_input: BlockAttention.Config
        attention_conv: ShortConvolution.Config
        ffn_conv: ShortConvolution.Config
        message: MessageGate.Config | None
        boundary: bool

        @property
        def matrix_elements(self) -> int:
            """Number of weights that a token is multiplied by."""
            return self.attention_elements + self.mixture.active_elements

        @property
        def attention_elements(self) -> int:
            """Number of `matrix_elements` in attention."""
            attention = self.attention
            assert isinstance(attention, InklingAttention.Config)
            dim, (queries, keys) = attention.dim, attention.widths
            bias = attention.bias
            more = attention.sink.out_features + bias.linear.out_features
            bank = bias.linear.out_features * bias.extent
            return dim * (3 * queries + 2 * keys + more) + bank

        @property
        def message_elements(self) -> int:
            """Number of weights of the gates that a pass from the second on multiplies by."""
            return 0 if self.message is None else 16 * self.message.dim * self.message.rank

    def __init__(self, config: Config) -> None:
        TransformerBlock.__init__(self)
        assert config.ffn_norm is not None
        source = config.attention_input
        self.attention_input = None if source is None else source.build()
        if len(config.norms_before) == 1:
            self.attention_norm = config.norms_before[0].build()
            self.before: list[nn.Module] = [self.attention_norm] * 3
        else:
            self.before = [norm.build() for norm in config.norms_before]
            self.q_norm, self.k_norm, self.v_norm = self.before
        self.attention = config.attention.build()
        self.attention_conv = config.attention_conv.build()
        self.ffn_input = config.ffn_input.build()
        self.ffn_norm = config.ffn_norm.build()
        self.moe = config.mixture.build()
        self.ffn_conv = config.ffn_conv.build()
        if config.message is not None:
            self.message_gates = ModuleDict({name: config.message.build() for name in _MESSAGES})
        self.boundary = config.boundary

    @property
    def can_join(self) -> bool:
        """No: its products have other inputs."""
        return False

    def forward(  # type: ignore[override]
        self,
        h_BLD: Tensor,
        context: LoopContext,
        slot: CacheSlot | None,
        blocks: Blocks,
        messages: Blocks = (),
    ) -> tuple[Tensor, Blocks, Tensor]:
        """Return state, blocks, and the number of tokens that chose each expert."""
        inputs: list[Tensor] = [h_BLD]
        if self.attention_input is not None:
            inputs = [*self.attention_input(*blocks, h_BLD)]
        inputs = inputs if len(inputs) == 3 else inputs * 3
        if messages:
            inputs = [
                self._told(name, x, message, slot)
                for name, x, message in zip(_STREAMS, inputs, messages, strict=False)
            ]
        q_BLD, k_BLD, v_BLD = (norm(x) for norm, x in zip(self.before, inputs, strict=True))
        made_BLD = self.attention(q_BLD, k_BLD, v_BLD, context, slot)
        made_BLD = self.attention_conv(made_BLD, None, context, slot, 2)
        if self.boundary:
            blocks = (*blocks, h_BLD)
        else:
            made_BLD = h_BLD + made_BLD
        (x_BLD,) = self.ffn_input(*blocks, made_BLD)
        if messages:
            x_BLD = self._told("ffn", x_BLD, messages[3], slot)
        mixed_BLD, load_E = self.moe(self.ffn_norm(x_BLD))
        return made_BLD + self.ffn_conv(mixed_BLD, None, context, slot, 3), blocks, load_E

    def _told(self, name: str, x: Tensor, message: Tensor, slot: CacheSlot | None) -> Tensor:
        told = self.message_gates[name](x, message)
        if slot is None or not isinstance(slot.step, Tensor):
            return told
        return torch.where((slot.step == 1).view(-1, 1, 1), x, told)


class InklingDecoder(LoopDecoder):
    """A decoder whose passes start from the prelude's states, and read the pass before."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoopDecoder.Config):
        """Layers are `InklingBlock`s; every layer has experts."""

        embed_norm: RMSNorm.Config
        messages: MessageQueries.Config
        final_input: BlockAttention.Config
        bias_rate: float
        expert_parallel: bool = False

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """As in the base class; experts are placed by the degree of expert parallelism."""
            self.expert_parallel = config.parallelism.expert_parallel_degree > 1
            LoopDecoder.Config.update_from_config(self, config=config, **kwargs)

        def set_layer_sharding(self, layer: Any, *, enable_sp: bool) -> None:
            """Spread the experts; `check_spreading` refuses what the rest would need."""
            if self.expert_parallel:
                names = ("gate_up_EFD", "down_EDF")
                set_moe_sharding_config(
                    layer.mixture,
                    enable_ep=True,
                    enable_sp=True,
                    expert_param_layout=dict.fromkeys(names, spmd.S(1)),
                )

        @property
        def whole_visits(self) -> bool:
            """As in the base class: experts are not compiled."""
            return False

        @property
        def hidden_dim(self) -> int:
            """Width of an expert."""
            return self.layers[0].mixture.routed_experts.inner_experts.hidden_dim

        @property
        def experts_per_active(self) -> float:
            """Experts over those that a token chooses."""
            mixture = self.layers[0].mixture
            return mixture.num_experts / mixture.router.top_k

        def idle_parameters(self, *, looped: bool = False) -> int:
            layers = [self.layers[n] for n in self.looped] if looped else self.layers
            return sum(layer.mixture.idle_elements for layer in layers)

        def reaches_start(self, recurrent_steps: float, reached: float) -> bool:
            """Return whether any pass has a gradient: each begins at the prelude's states."""
            return reached > 0

        def own_flops(self, flops: Flops, recurrent_steps: float, reached: float) -> Flops:
            """As in the base class, layer by layer, with the gates of messages."""
            places = self.visits_by_place(recurrent_steps, reached)
            counts = (self.prelude_layers, len(self.looped), self.coda_layers)
            total, layers = 0.0, iter(self.layers)
            for visits, count in zip(places, counts, strict=True):
                for _ in range(count):
                    layer = next(layers)
                    later = max(visits.forward - 1, 0), min(visits.backward, visits.forward - 1)
                    total += (2 * visits.forward + 4 * visits.backward) * layer.matrix_elements
                    total += (2 * later[0] + 4 * max(later[1], 0)) * layer.message_elements
            return flops._replace(matrices=total)

        def check_spreading(
            self, *, tensor_parallel: int, context_parallel: int, expert_parallel: int
        ) -> None:
            """Refuse what ranks of this family cannot share: windows, and heads."""
            for name, degree in {"tensor": tensor_parallel, "context": context_parallel}.items():
                if degree != 1:
                    field = f"parallelism.{name}_parallel_degree={degree}"
                    raise UserError(f"{field} does not work with family inkling; leave it at 1")
            if (experts := self.layers[0].mixture.num_experts) % expert_parallel:
                raise UserError(
                    f"parallelism.expert_parallel_degree={expert_parallel} must divide "
                    f"model.experts={experts}"
                )

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.embed_norm = config.embed_norm.build()
        self.messages = config.messages.build()
        self.final_input = config.final_input.build()
        self.loads: dict[int, Tensor] = {}
        self._counted: dict[int, Tensor] = {}
        self._visits: list[tuple[int, Tensor]] | None = None

    def forward(self, *args: Any, **named: Any) -> LoopOutput:
        self._visits = []
        try:
            output = super().forward(*args, **named)
        finally:
            visits, self._visits = self._visits, None
        if self.training and torch.is_grad_enabled():
            for layer, load_E in visits:
                counted = self._counted.get(layer)
                self._counted[layer] = load_E if counted is None else counted + load_E
        return output

    def start(self, tokens: Tensor, context: LoopContext) -> Handed:
        """Run the prelude; no pass has handed on anything yet, so what stands for it is empty."""
        first = range(self.config.looped.start)
        hidden_BLD = self.embed_norm(self.tok_embeddings(tokens))
        run = self.recurrence.wrapped(self._run)
        hidden_BLD, blocks = run(first, hidden_BLD, (), context, None, 0, ())
        none_BL1 = torch.zeros_like(hidden_BLD[..., :1])
        made = sum(self.config.layers[index].boundary for index in self.config.looped) - 1
        return Handed(none_BL1, (none_BL1,) * made, hidden_BLD, blocks)

    def step(self, carry: Carry, step: int | Tensor, context: LoopContext) -> Any:
        looped = self.config.looped
        handed = () if isinstance(step, int) and step == 1 else (*carry.passed, carry.hidden_BLD)
        start = carry.before_BLD, carry.before
        hidden_BLD, blocks = self._run(looped, *start, context, step, -looped.start, handed)
        return Handed(hidden_BLD, blocks[len(carry.before) + 1 :], *start)

    def advance(
        self, carry: Carry, hidden_BLD: Any, step: int | Tensor, context: LoopContext
    ) -> Handed:
        """Return the state of the pass, which is the next one's carry."""
        return hidden_BLD

    def read(
        self, hidden_BLD: Any, context: LoopContext, step: int | Tensor | None = None
    ) -> Tensor:
        """Run the coda; return what is read of its blocks, normed."""
        looped = self.config.looped
        coda = range(looped.stop, len(self.layers))
        blocks = (*hidden_BLD.before, hidden_BLD.before_BLD, *hidden_BLD.passed)
        run = self.recurrence.wrapped(self._run)
        last_BLD, blocks = run(coda, hidden_BLD.hidden_BLD, blocks, context, None, -len(looped), ())
        return self.norm(self.final_input(*blocks, last_BLD)[0])

    def _run(
        self,
        layers: range,
        hidden_BLD: Tensor,
        blocks: Blocks,
        context: LoopContext,
        step: int | Tensor | None,
        shift: int,
        handed: Blocks,
    ) -> tuple[Tensor, Blocks]:
        """Apply layers; `handed` is the state of the pass before, if there was one."""
        for index in layers:
            unaddressed = context.cache is None and not self.tells_step
            slot = None if unaddressed else CacheSlot(step, index + shift)
            told = self.messages(index - layers.start, handed) if handed else ()
            layer = self.layers[str(index)]
            hidden_BLD, blocks, load_E = layer(hidden_BLD, context, slot, blocks, told)
            if self._visits is not None:
                self._visits.append((index, load_E))
        return hidden_BLD, blocks

    def convolved(self) -> tuple[int, tuple[int, ...]]:
        """As in the base class: of keys, values, and both branches."""
        layer = self.config.layers[0]
        keys = layer.attention.widths[1]
        return layer.ffn_conv.taps, (keys, keys, self.config.dim, self.config.dim)

    @torch.no_grad()
    def after_update(self, mesh: DeviceMesh | None, updated: Tensor) -> None:
        """Count the step's loads over all ranks, and balance the experts by them."""
        counted, self._counted = self._counted, {}
        layers = sorted(counted)
        loads_VE = torch.stack([counted[layer] for layer in layers])
        if mesh is not None:
            dist.all_reduce(loads_VE, group=mesh.get_group())
        self.loads = dict(zip(layers, loads_VE.unbind(), strict=True))
        for layer, load_E in self.loads.items():
            mixture = self.get_submodule(f"layers.{layer}.moe")
            assert isinstance(mixture, Mixture)
            mixture.balance(load_E, self.config.bias_rate * updated)

    def record(self) -> Mapping[str, Any]:
        """Return the largest load of an expert over the mean, and the number without a token."""
        shares = torch.stack([load_E / load_E.float().mean() for load_E in self.loads.values()])
        return {
            "experts/max_load": float(shares.max()),
            "experts/unused": int((shares == 0).sum()),
        }

    def compiled_parts(self) -> nn.Module:
        """Return the layers' attention: experts are not compiled."""
        parts = nn.Module()
        layers: dict[str, Any] = dict(self.layers.items())
        parts.layers = ModuleDict({name: layer.attention for name, layer in layers.items()})
        return parts

    def parameter_group(self, name: str, parameter: Tensor) -> ParameterGroup:
        """As in the base class; scales and queries do not decay."""
        if name.endswith((".scale", "query", "queries")):
            return ParameterGroup(decays=False)
        return super().parameter_group(name, parameter)

    def units(self) -> list[Unit]:
        """As in the base class, with experts, the embedding's norm, the messages, the last read."""
        return [
            Unit("embedding norm", (self.embed_norm,), place="before", fp32=True, kept=True),
            Unit("messages", (self.messages,), fp32=True, kept=True),
            *with_experts(super().units(), [*self.layers.values()]),
            Unit("last read", (self.final_input,), place="after", fp32=True, kept=True),
        ]
