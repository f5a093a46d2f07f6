"""One application of the shared stack to tokens that may be at different recurrent steps.

All steps have the same weights, so rows at steps 1, 3 and 2 go through the layers in one call; only
the cache needs to know which row is at which step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from titan_loop.errors import UserError
from titan_loop.inference.cache import CacheShape, LoopCache, Places, TokenVisit
from titan_loop.models.attention import DocumentAttention, LoopAttention
from titan_loop.models.context import KeyValueCache, LoopContext, WindowedMasks
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.recurrence import Carry


@dataclass
class Work:
    """Bytes of caches, number of calls of the stack, and tokens in those calls with padding."""

    cache_bytes: int = 0
    applications: int = 0
    token_steps: int = 0


class LoopState(NamedTuple):
    """State of tokens between two of their steps; every leaf is (B, L, …).

    Attributes:
        hidden_BLD: State after the last step; a pytree for families with several streams.
        read_BLD: Input of head, gate and exit policies; the state's first part if none reads it.
    """

    carry: Carry
    hidden_BLD: Tensor
    read_BLD: Tensor


class Stack:
    """A looped decoder as the engine calls it; raises `UserError` if it cannot read a cache.

    Attributes:
        captures: Whether visits that come up often are captured or compiled.
        compiles: Whether they are compiled.
        packed: Whether `pack` found matrices.
        drafts: Number of tokens that a round of drafts may take back.
    """

    def __init__(self, model: LoopDecoder) -> None:
        attention = model.layers["0"].attention
        assert isinstance(attention, LoopAttention)
        kernel = attention.inner_attention
        if not isinstance(kernel, DocumentAttention):
            raise UserError(
                f"model.attention={type(kernel).__name__} cannot decode; build it with sdpa"
            )
        self.model, self.readout, self.gate = model, model.readout, model.gate
        self.attention = attention
        self.work = Work()
        weight = model.tok_embeddings.weight
        self.device = weight.device
        self.dtype = weight.dtype
        # Until a capture fails.
        self.captures = self.device.type == "cuda"
        self.compiles = self.packed = False
        self.drafts = 0
        # On a CPU a copy of all keys costs more than reading them where they stand.
        reads_entries = self.device.type == "cpu" and all(
            type(layer.attention) is LoopAttention and layer.attention.reads_entries
            for layer in model.layers.values()
        )
        wide = self.dtype in (torch.float32, torch.float64)  # torch's sparse products know no other
        self._queries = attention.n_heads if reads_entries and wide else None

    def captures_rows(self, steps: Sequence[int]) -> bool:
        """Return whether visits of rows at these steps may be captured or compiled."""
        # Compiled, rows at different steps copy the whole cache, and packed products are faster.
        slow = self.compiles and (min(steps) < max(steps) or (self.packed and len(steps) > 1))
        return self.captures and not slow

    @property
    def context_tokens(self) -> int:
        """Longest sequence of the model as it was built."""
        return self.model.config.max_seq_len

    def make_cache(
        self, strategy: type[LoopCache], *, steps: int, rows: int, capacity: int
    ) -> LoopCache:
        """Allocate an empty cache."""
        shape = self.cache_shape(steps=steps, rows=rows, capacity=capacity)
        cache = strategy(shape, dtype=self.dtype, device=self.device)
        self.work.cache_bytes += cache.allocated_bytes
        return cache

    def cache_shape(self, *, steps: int, rows: int, capacity: int) -> CacheShape:
        """Return the sizes of a cache for `rows` rows of `capacity` tokens."""
        return CacheShape(
            *self.model.cache_slots(steps),
            rows,
            capacity,
            self.attention.n_kv_heads,
            self.attention.head_dim,
            self.model.config.window,
            *self.model.convolved(),
            self.drafts,
        )

    def prompt_context(
        self,
        tokens_BL: Tensor,
        lengths_B: Tensor,
        cache: KeyValueCache | None,
        *,
        prefix_B: Tensor | None = None,
    ) -> LoopContext:
        """Return the context that all steps of whole prompts from position 0 share.

        By default a whole prompt is a prefix.
        """
        prefix_B = lengths_B if prefix_B is None else prefix_B
        columns = self.model.prompt_columns(tokens_BL, prefix_B)
        return self.model.make_context(tokens_BL, cache=cache, columns=columns)

    def token_context(self, positions_BL: Tensor, cache: LoopCache) -> LoopContext:
        """Return the context that the steps of new tokens share."""
        return self.context_at(Places.of(positions_BL, queries=self._queries), cache)

    def context_at(self, places: Places, cache: LoopCache) -> LoopContext:
        """Return the context that the steps of tokens at these places share."""
        positions_BL = places.positions_BL
        key_S = torch.arange(places.seen, device=self.device)
        distance_B1LS = (positions_BL.unsqueeze(-1) - key_S).unsqueeze(1)
        # Rows in step see all their keys.
        mask = None if places.in_step else distance_B1LS >= 0
        if (window := self.model.config.window) is not None:
            mask = WindowedMasks(mask, (distance_B1LS >= 0) & (distance_B1LS < window))
        visit = TokenVisit(cache, places)
        return self.model.make_context(
            positions_BL, positions_BL, mask, visit, key_positions=key_S.unsqueeze(0)
        )

    def step(
        self,
        state: LoopState | None,
        tokens_BL: Tensor | None,
        steps: Sequence[int],
        context: LoopContext,
        *,
        reads: bool = True,
    ) -> LoopState:
        """Run every row's own next step.

        Args:
            state: State after the step before; None if all rows are at step 1.
            tokens_BL: Tokens that rows at step 1 start from; None if no row is at step 1.
            reads: Whether anything reads a state after this step; if not, no coda runs.
        """
        step = steps[0] if min(steps) == max(steps) else torch.tensor(steps, device=self.device)
        self.count(len(steps) * context.positions_BL.shape[1])
        return self.visit(state, tokens_BL, step, context, reads=reads)

    def count(self, tokens: int) -> None:
        """Count an application of the stack to so many tokens."""
        self.work.applications += 1
        self.work.token_steps += tokens

    def visit(
        self,
        state: LoopState | None,
        tokens_BL: Tensor | None,
        step: int | Tensor,
        context: LoopContext,
        *,
        reads: bool,
    ) -> LoopState:
        """Apply the stack as `step` does; `step` is every row's, or a (B,) tensor.

        The host reads no tensor, unless the family does, so that a graph can be captured.
        """
        carry = self._carry(state, tokens_BL, step, context)
        hidden_BLD = self.model.step(carry, step, context)
        first_BLD = tree_leaves(hidden_BLD)[0]
        read_BLD = self.model.read(hidden_BLD, context, step) if reads else first_BLD
        return LoopState(carry, hidden_BLD, read_BLD)

    def _carry(
        self,
        state: LoopState | None,
        tokens_BL: Tensor | None,
        step: int | Tensor,
        context: LoopContext,
    ) -> Carry:
        def advanced(done: int | Tensor) -> Carry:
            assert state is not None
            return self.model.advance(state.carry, state.hidden_BLD, done, context)

        if tokens_BL is None:
            return advanced(step - 1)
        if isinstance(step, int):
            return self.model.start(tokens_BL, context) if step == 1 else advanced(step - 1)
        starts_B = step == 1

        def chosen(start: Tensor, advance: Tensor) -> Tensor:
            return torch.where(starts_B.view(-1, *[1] * (start.ndim - 1)), start, advance)

        started = self.model.start(tokens_BL, context)
        return tree_map(chosen, started, advanced((step - 1).clamp_min(1)))
