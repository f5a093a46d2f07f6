"""The looped decoder: unique layers, applied R times, norm and exit gate after every step.

    h_0 = embed(x)
    h_r = norm(layer_N(… layer_1(h_{r-1}) …)),   r = 1 … R
    exit logit_r = gate(read(h_r)),   logits_r = lm_head(read(h_r)),   read(h) = h

With the norm at the readout only, h_r is the layers' output and read(h) = norm(h). The first
`prelude_layers` and the last `coda_layers` may stand outside the loop:

    h_0 = prelude(embed(x)),   read(h) = norm(coda(h))

R may be any positive number and differ from batch to batch, without recompilation. With R = 1 and
no gate this is an ordinary decoder.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §3.1 Eq. 1, as in the released checkpoints.
Prelude and coda: Geiping et al. 2025, arXiv 2502.05171, §3.1, whose code also applies the same
norm after a step and after the coda.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.nn_modules import Identity

from titan_loop.errors import UserError
from titan_loop.models.attention import document_block_mask, document_mask
from titan_loop.models.context import (
    PREFIX,
    AttentionMask,
    CacheSlot,
    KeyValueCache,
    LoopContext,
    WindowedMasks,
    WindowShare,
)
from titan_loop.models.decoder_costs import DecoderCosts
from titan_loop.models.dropout import Dropout
from titan_loop.models.injection import Injected
from titan_loop.models.joined import Joined, join
from titan_loop.models.low_weights import LowWeights
from titan_loop.models.output import Collect, LoopOutput
from titan_loop.models.parameter_groups import ParameterGroup, default_group
from titan_loop.models.positions import Positions, RelativePositions, RotaryPositions
from titan_loop.models.recurrence import Carry, Recurrence
from titan_loop.models.replay import EXIT_STEP, ReplayedKeys
from titan_loop.models.sharding import set_block_sharding, set_parts_sharding
from titan_loop.models.units import LAYERS, NORM_AND_GATE, OUTSIDE, TABLES, Unit

Visit: TypeAlias = Callable[
    [Sequence[nn.Module], Sequence[Joined | None], Tensor, LoopContext], Tensor
]
"""(layers, their joined matrices, input (B, L, D), context without cache) → output (B, L, D)."""


class LoopDecoder(Decoder):
    """A decoder whose stack of unique layers is applied `recurrent_steps` times."""

    tells_step: bool = False
    """Whether layers are told the step of their visit, and so are compiled for each step."""

    @dataclass(kw_only=True, slots=True)
    class Config(DecoderCosts):
        columns: ClassVar[tuple[str, ...]] = ()
        """Columns of the batch that `forward` reads; the loader must declare them."""

        most_steps: ClassVar[int | None] = None
        """Largest number of recurrent steps; None for any."""

        architecture: dict[str, Any] = field(default_factory=dict)
        """The model's record, from `titan_loop.models.family.decoder_config`."""

        state_gather: Identity.Config = field(default_factory=Identity.Config)
        positions: Positions.Config = field(default_factory=RotaryPositions.Config)
        embedding_scale: float = 1.0
        embedding_dropout: Dropout.Config | None = None
        width_ratio: float = 1.0

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Take window length and placements from a trainer's config."""
            Decoder.Config.update_from_config(self, config=config, **kwargs)
            self.set_sharding(enable_sp=config.parallelism.enable_sequence_parallel)

        def set_sharding(self, *, enable_sp: bool) -> None:
            """Declare every sub-module's placements; the mesh later decides which of them apply."""
            set_parts_sharding(self, enable_sp=enable_sp)
            for layer in self.layers:
                self.set_layer_sharding(layer, enable_sp=enable_sp)

        def set_layer_sharding(self, layer: Any, *, enable_sp: bool) -> None:
            """Declare the placements of one layer."""
            set_block_sharding(layer, enable_sp=enable_sp)

        @property
        def family(self) -> str:
            """Name of the family."""
            return self.architecture["family"]

        @property
        def aux(self) -> tuple[str, ...]:
            """Names that an objective may request in `LoopOutput.aux`."""
            return ()

        @property
        def hidden_dim(self) -> int:
            """Width F of a dense feed-forward."""
            return self.layers[0].feed_forward.w1.out_features

        @property
        def window(self) -> int | None:
            """Keys that a query of windowed layers sees; None without such layers."""
            windows = (layer.attention.window for layer in self.layers)
            return next((window for window in windows if window is not None), None)

        @property
        def draws(self) -> bool:
            """Whether the model draws random numbers in training."""
            parts = (self.embedding_dropout, *(layer.dropout for layer in self.layers))
            return any(part is not None for part in parts)

        @property
        def whole_visits(self) -> bool:
            """Whether a visit only applies layers, untold of the step; it is then one graph."""
            return True

        def check_spreading(
            self, *, tensor_parallel: int, context_parallel: int, expert_parallel: int
        ) -> None:
            """Raise `UserError` for a degree that this architecture does not support."""
            if expert_parallel != 1:
                problem = f"model.family={self.family} has no experts; leave it at 1"
                raise UserError(f"parallelism.expert_parallel_degree={expert_parallel}: {problem}")
            degrees = {"tensor_parallel": tensor_parallel, "context_parallel": context_parallel}
            for name, degree in degrees.items():
                if degree > 1 and isinstance(self.positions, RelativePositions.Config):
                    field = f"parallelism.{name}_degree={degree}"
                    kind = f"model.positions={self.positions.kind}"
                    raise UserError(f"{field} does not work with {kind}; leave it at 1")

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.recurrent_steps = config.recurrent_steps
        self.recurrence = Recurrence()
        self.joined_layers: tuple[int, ...] = ()
        """Layers whose matrices training joins where they multiply the same input."""
        self.low_weights: LowWeights | None = None
        """On one device, what stands for the parameters in a lower dtype."""
        self.compiled_visit: Visit | None = None
        """Applies looped layers in training as one graph, untold of step and cache."""
        self.norm_placement = config.norm_placement
        self.scale = math.sqrt(config.dim) if config.scale_embeddings else config.embedding_scale
        self.exit_gate = None if config.exit_gate is None else config.exit_gate.build()
        # Parameter-free: under sequence parallelism the state stays sharded for the next step,
        # while readout and gate see this module's gathered copy.
        self.state_gather = config.state_gather.build()
        rope = config.layers[0].attention.rope
        self.positions: Positions = config.positions.build(rope=rope)
        dropout = config.embedding_dropout
        self.embedding_dropout = None if dropout is None else dropout.build()
        self.injection = None if config.injection is None else config.injection.build()

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention_masks: AttentionMask | None = None,
        *,
        recurrent_steps: int | None = None,
        backward_steps: int | None = None,
        collect: Collect = "all",
        columns: Mapping[str, Tensor] | None = None,
    ) -> LoopOutput:
        """Run R recurrent steps over whole windows; return their states and exit logits.

        Args:
            positions: (B, L), restarting per document; None takes each window as one document.
            attention_masks: Mask of the attention backend; None builds it from `positions`.
            recurrent_steps: R; None means `self.recurrent_steps`.
            backward_steps: k, the last steps that the backward pass reaches; None for all.
        """
        steps = self.recurrent_steps if recurrent_steps is None else recurrent_steps
        if steps < 1:
            raise ValueError(f"recurrent_steps={steps} must be at least 1")
        context = self.make_context(tokens, positions, attention_masks, columns=columns)
        if self.joined_layers:
            context = context._replace(joined=self._joined())
        hidden_RBLD: list[Tensor] = []
        exit_logit_RBL: list[Tensor] = []
        carry = self.start(tokens, context)
        states = self.recurrence.run(self, carry, steps, context, backward_steps)
        for step, hidden_BLD in enumerate(states, start=1):
            if collect == "last" and step < steps:
                continue
            gathered_BLD = self.state_gather(self.read(hidden_BLD, context, step))
            hidden_RBLD.append(gathered_BLD)
            if self.exit_gate is not None:
                exit_logit_RBL.append(self.exit_gate(gathered_BLD))
        first_step = steps if collect == "last" else 1
        return LoopOutput(tuple(hidden_RBLD), tuple(exit_logit_RBL), first_step)

    def _joined(self) -> Mapping[int, Joined]:
        if self.low_weights is not None:
            return self.low_weights.joined
        layers: dict[int, Any] = {n: self.layers[str(n)] for n in self.joined_layers}
        return {n: Joined(*map(join, layer.joinable)) for n, layer in layers.items()}

    def make_context(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention_masks: AttentionMask | None = None,
        cache: KeyValueCache | None = None,
        columns: Mapping[str, Tensor] | None = None,
        key_positions: Tensor | None = None,
    ) -> LoopContext:
        """Gather the inputs that all layer visits of one pass share.

        Args:
            positions: (B, L), restarting per document; None counts from 0.
            attention_masks: None builds one from `positions`, any prefix and the layers' windows;
                with none of them, or with a cache alone, attention is plain causal. With a cache:
                (B, 1, L, L_key).
            key_positions: (B or 1, S) of the cache's keys; None if only current tokens have keys.
        """
        prefix = None if columns is None else columns.get(PREFIX)
        mask_wanted = cache is None and (positions is not None or self._needs_mask())
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        windowed = self.config.window is not None and key_positions is None
        if attention_masks is None and (mask_wanted or prefix is not None or windowed):
            attention_masks = self.get_attention_masks(positions, prefix=prefix)
        if columns is not None and EXIT_STEP in columns:
            cache = ReplayedKeys(columns[EXIT_STEP])
        keys = positions if key_positions is None else key_positions
        shared = self.positions.shared(positions, keys)
        return LoopContext(positions, shared, attention_masks, cache, columns)

    def start(self, tokens: Tensor, context: LoopContext) -> Carry:
        """Return the carry of step 1: the embedding, and with input injection also a state."""
        token_BLD = self.scaled(self.tok_embeddings(tokens))
        embedding_BLD = self.positions.embedded(token_BLD, context.positions_BL)
        if self.embedding_dropout is not None:
            embedding_BLD = self.embedding_dropout(embedding_BLD)
        embedding_BLD = self._outside(range(self.config.looped.start), embedding_BLD, context)
        return embedding_BLD if self.injection is None else self.injection.start(embedding_BLD)

    def scaled(self, embedding_BLD: Tensor) -> Tensor:
        """Return token embeddings as they enter the state."""
        return embedding_BLD if self.scale == 1 else embedding_BLD * self.scale

    def input(self, carry: Carry, context: LoopContext) -> Tensor:
        """Return the first layer's input in a step, (B, L, D); recomputed with the step."""
        return carry if self.injection is None else self.injection(*carry)

    def advance(
        self, carry: Carry, hidden_BLD: Tensor, step: int | Tensor, context: LoopContext
    ) -> Carry:
        """Return the carry of `step` + 1; called only if that step runs, never recomputed.

        `step` counts from 1, or is a (B,) tensor. The engine drops the result of rows that begin a
        new token.
        """
        return hidden_BLD if self.injection is None else Injected(hidden_BLD, carry.embedding_BLD)

    def step(self, carry: Carry, step: int | Tensor, context: LoopContext) -> Tensor:
        """Apply every looped layer once, and the norm if it ends every step; return h_step.

        `step`, an int from 1 or a (B,) tensor, reaches layers only with a cache or `tells_step`.
        """
        looped = self.config.looped
        hidden_BLD = self._visit(looped, self.input(carry, context), context, step, -looped.start)
        return self.norm(hidden_BLD) if self.norm_placement == "every_step" else hidden_BLD

    def read(
        self, hidden_BLD: Tensor, context: LoopContext, step: int | Tensor | None = None
    ) -> Tensor:
        """Map the state after a step to the input of head, gate and exit policies.

        `step`, a number or a (B,) tensor, is for families whose reading depends on it.
        """
        coda = range(self.config.looped.stop, len(self.layers))
        if not coda and self.norm_placement == "every_step":
            return hidden_BLD
        return self.norm(self._outside(coda, hidden_BLD, context))

    def looped_layers(self) -> list[nn.Module]:
        """Return the layers that every step applies."""
        return [self.layers[str(index)] for index in self.config.looped]

    def _outside(self, layers: range, hidden_BLD: Tensor, context: LoopContext) -> Tensor:
        if not layers:
            return hidden_BLD
        looped = self.config.looped
        shift = 0 if layers.start < looped.start else -len(looped)
        return self.recurrence.wrapped(self._visit)(layers, hidden_BLD, context, None, shift)

    def _visit(
        self,
        layers: range,
        hidden_BLD: Tensor,
        context: LoopContext,
        step: int | Tensor | None,
        shift: int,
    ) -> Tensor:
        """Apply layers one after the other; index + `shift` is a layer's number in the cache."""
        joined, context = context.joined or {}, context._replace(joined=None)
        told = context.cache is not None or self.tells_step
        # Evaluation has windows of many lengths, and each would be a graph of its own.
        trains = step is not None and not told and torch.is_grad_enabled()
        if self.compiled_visit is not None and trains:
            modules = tuple(self.layers[str(index)] for index in layers)
            matrices = tuple(joined.get(index) for index in layers)
            return self.compiled_visit(modules, matrices, hidden_BLD, context)
        for index in layers:
            # Without a cache the slot stays None, so that compiled blocks do not specialise on it.
            slot = CacheSlot(step, index + shift) if told else None
            more = {"joined": joined[index]} if index in joined else {}
            hidden_BLD = self.visit_layer(index, hidden_BLD, context, slot, step, **more)
        return hidden_BLD

    def visit_layer(
        self,
        index: int,
        hidden_BLD: Tensor,
        context: LoopContext,
        slot: CacheSlot | None,
        step: int | Tensor | None,
        **joined: Joined,
    ) -> Tensor:
        """Apply a layer at `step`, None outside the loop; a family may keep its other outputs."""
        return self.layers[str(index)](hidden_BLD, context, slot, **joined)

    def readout(self, read_BLD: Tensor) -> Tensor:
        """Map the output of `read`, (B, L, D), to logits (B, L, V)."""
        return self.lm_head(self.state_gather(read_BLD))

    def gate(self, read_BLD: Tensor) -> Tensor:
        """Map the output of `read`, (B, L, D), to exit logits (B, L) in fp32; needs a gate."""
        if self.exit_gate is None:
            raise ValueError("this model has no exit gate")
        return self.exit_gate(self.state_gather(read_BLD))

    def units(self) -> list[Unit]:
        """List the modules that are gathered, freed and reduced together, roughly in order of use.

        Every parameter belongs to exactly one unit: a family lists its own modules here, too.
        """
        parts = (self.injection, self.norm, self.exit_gate)
        small = [m for m in parts if m is not None and any(True for _ in m.parameters())]
        looped, layers = self.config.looped, list(self.layers.values())
        reader = "step" if self.exit_gate else "after"  # a gate reads every state through the coda
        steps = [
            *(Unit(OUTSIDE, (layer,), place="before") for layer in layers[: looped.start]),
            *(Unit(LAYERS, (layer,)) for layer in self.looped_layers()),
            # Gate arithmetic is never rounded to bf16.
            *([Unit(NORM_AND_GATE, tuple(small), fp32=True, kept=True)] if small else []),
            *(Unit(OUTSIDE, (layer,), place=reader) for layer in layers[looped.stop :]),
        ]
        embedding: tuple[nn.Module, ...] = (self.tok_embeddings, *self.positions.tables())
        if self.config.enable_weight_tying:
            both = (*embedding, self.lm_head)
            return [Unit(TABLES, both, place="after", kept=True), *steps]
        return [
            # The gradient of a table lookup needs indices, not the table.
            Unit(TABLES, embedding, place="before", gathered_in_backward=False),
            *steps,
            # The head's backward pass follows its forward pass at once.
            Unit(TABLES, (self.lm_head,), place="after", kept=True),
        ]

    def compiled_parts(self) -> nn.Module:
        """Return a module whose `layers` are compiled, each on its own."""
        return self

    def prompt_columns(self, tokens_BL: Tensor, prefix_B: Tensor) -> Mapping[str, Tensor] | None:
        """Return the columns with which an engine reads prompts; None for none.

        `tokens_BL` are padded on the right; the first `prefix_B` of them are a prefix.
        """
        return None

    def cache_slots(self, recurrent_steps: int) -> tuple[int, int, int]:
        """Return the steps, looped layers and other layers that an engine's cache addresses."""
        looped = len(self.config.looped)
        return recurrent_steps, looped, len(self.layers) - looped

    def convolved(self) -> tuple[int, tuple[int, ...]]:
        """Return taps and channels of the short convolutions of a layer, which a cache keeps."""
        return 1, ()

    def parameter_group(self, name: str, parameter: Tensor) -> ParameterGroup:
        """Return the optimisers' treatment of a whole or sharded parameter, named as saved."""
        owner = self.get_submodule(name.rpartition(".")[0])
        return default_group(name, parameter, owner, self.config.width_ratio)

    def after_update(self, mesh: DeviceMesh | None, updated: Tensor) -> None:
        """Update state that no gradient changes, after a training step; collective.

        `mesh` spans the ranks that train on different tokens; None if there is only one. `updated`
        is a bool tensor on the device, False if the step left the weights unchanged.
        """

    def record(self) -> Mapping[str, Any]:
        """Return entries of a logged step's record in `metrics.jsonl`, equal on all ranks."""
        return {}

    def get_attention_masks(  # type: ignore[override]  a boolean mask is new
        self, positions: Tensor, share: WindowShare | None = None, prefix: Tensor | None = None
    ) -> AttentionMask | None:
        """Build the backend's causal-and-same-document mask; arguments as in `document_mask`."""
        whole = self._mask(positions, share, prefix, None)
        if (window := self.config.window) is None:
            return whole
        return WindowedMasks(whole, self._mask(positions, share, prefix, window))

    def _mask(
        self,
        positions: Tensor,
        share: WindowShare | None,
        prefix: Tensor | None,
        window: int | None,
    ) -> Any:
        if not self._needs_mask():
            return document_mask(positions, share, prefix, window)
        kernel = self.config.layers[0].attention.inner_attention
        if share is None and prefix is None and window is None:
            return super().get_attention_masks(positions)
        assert isinstance(kernel, FlexAttention.Config), "varlen takes no share, prefix or window"
        return document_block_mask(positions, share, kernel.block_size, prefix, window)

    def _needs_mask(self) -> bool:
        kernel = self.config.layers[0].attention.inner_attention
        return isinstance(kernel, FlexAttention.Config | VarlenAttention.Config)
