"""Visits of the stack as CUDA graphs: one launch in place of the thousands of a visit's kernels.

    tokens, steps, places, state ─► copied into tensors that stay ─► replay ─► state, copied out

What a graph cannot take as a tensor is its `Kind`; a kind of visit is captured when it has come up
`OFTEN` times, since many come up once where answers have many lengths. The keys that attention
reads are rounded up, so a row crosses into another kind once in `KEYS` tokens. Decisions, readout
and sampling stay outside: they differ from row to row.

On a CPU the same visits run without a graph, for tests. Not yet run on a GPU.
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from titan_loop.inference.cache import LoopCache, Places
from titan_loop.inference.stack import LoopState, Stack

logger = logging.getLogger(__name__)

KEYS = 256
"""A graph's attention reads a multiple of so many keys."""
OFTEN = 3
MOST_KINDS = 256
"""Kinds that are kept; the one that was used longest ago goes."""


class Kind(NamedTuple):
    """All that a graph is bound to, beside the cache.

    Attributes:
        keys: Keys of each row that attention reads; those behind its own are masked.
        step: Step of all rows; None if they are at different ones.
        starts: Whether a row starts from its token.
        reads: Whether anything reads the state after the step.
        shapes: Shapes of the state's leaves: a family may have placeholders before its first step.
    """

    rows: int
    keys: int
    step: int | None
    starts: bool
    reads: bool
    shapes: tuple[torch.Size, ...]


class FixedVisit:
    """One kind of visit, on tensors that stay where they are."""

    def __init__(self, stack: Stack, cache: LoopCache, kind: Kind, state: LoopState) -> None:
        self._stack, self._cache, self._kind = stack, cache, kind
        self._token_3B = torch.zeros((3, kind.rows), dtype=torch.int64, device=stack.device)
        self._state = tree_map(torch.empty_like, state)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output = state
        self.runs = 0

    def run(self, state: LoopState, token_3B: Tensor) -> LoopState:
        """Return the next state; `token_3B` are tokens, steps and positions of the rows."""
        self._token_3B.copy_(token_3B)
        tree_map(lambda kept, new: kept.copy_(new), self._state, state)
        self.runs += 1
        if self._graph is None:
            return self._visit()
        self._graph.replay()
        return tree_map(torch.clone, self._output)  # the next replay writes there

    def capture(self, pool: Any) -> None:
        """Record the visit; nothing is computed. Libraries must have set themselves up by a run."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Other threads may pin memory meanwhile.
            with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                self._output = self._visit()
        finally:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own
        self._graph = graph

    def _visit(self) -> LoopState:
        tokens_B1, _, position_B1 = self._token_3B.unsqueeze(2)
        context = self._stack.context_at(
            Places(position_B1, self._kind.keys, in_step=False), self._cache
        )
        step = self._token_3B[1] if self._kind.step is None else self._kind.step
        return self._stack.visit(
            self._state,
            tokens_B1 if self._kind.starts else None,
            step,
            context,
            reads=self._kind.reads,
        )


class CapturedVisits:
    """`Stack.step` for new tokens of all rows of a cache, by a graph for each kind of visit."""

    def __init__(self, stack: Stack, cache: LoopCache) -> None:
        self._stack, self._cache = stack, cache
        self._visits: dict[Kind, FixedVisit] = {}
        # Graphs may share memory, since what one wrote is copied before another runs.
        self._pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None

    def step(
        self,
        state: LoopState,
        tokens: Sequence[int],
        steps: Sequence[int],
        positions: Sequence[int],
        *,
        reads: bool,
    ) -> LoopState:
        """Run every row's own next step; `tokens` are those the rows' states belong to."""
        seen = max(positions) + 1
        kind = Kind(
            rows=len(steps),
            keys=min(-(-seen // KEYS) * KEYS, self._cache.shape.capacity),
            step=steps[0] if min(steps) == max(steps) else None,
            starts=1 in steps,
            reads=reads,
            shapes=tuple(leaf.shape for leaf in tree_leaves(state)),
        )
        token_3B = torch.tensor([tokens, steps, positions], device=self._stack.device)
        self._stack.count(len(steps))
        visit = self._visits.pop(kind, None) or FixedVisit(self._stack, self._cache, kind, state)
        self._visits[kind] = visit  # the last one
        if len(self._visits) > MOST_KINDS:
            del self._visits[next(iter(self._visits))]
        state = visit.run(state, token_3B)
        if visit.runs == OFTEN:
            self._capture(visit)
        return state

    def _capture(self, visit: FixedVisit) -> None:
        if not self._stack.captures:
            return
        try:
            visit.capture(self._pool)
        except RuntimeError as error:
            self._stack.captures = False
            family, cause = self._stack.model.config.family, error.__context__ or error
            logger.warning(
                "model.family=%s with a %s cannot be captured in a CUDA graph, so the host decides "
                "its speed: %s",
                *(family, type(self._cache).__name__, str(cause).splitlines()[0]),
            )
