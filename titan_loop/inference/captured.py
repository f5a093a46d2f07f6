"""Visits of the stack as CUDA graphs: one launch in place of the thousands of a visit's kernels.

    tokens, steps, places, state ─► copied into tensors that stay ─► replay ─► state, copied out

What a graph cannot take as a tensor is its `Kind`; a kind of visit is captured when it has come up
`OFTEN` times, since many come up once where answers have many lengths. The keys that attention
reads are rounded up, so a row crosses into another kind once in `KEYS` tokens. Decisions, readout
and sampling stay outside: they differ from row to row.

On a CPU such a visit is compiled instead (`compiled.py`). Not yet run on a GPU.
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from titan_loop.inference.cache import LoopCache, Places
from titan_loop.inference.compiled import Code, compile_visit
from titan_loop.inference.stack import LoopState, Stack

logger = logging.getLogger(__name__)

KEYS = 256
"""A graph's attention reads a multiple of so many keys."""
OFTEN = 3
MOST_KINDS = 256
"""Kinds that are kept; the one that was used longest ago goes."""


def rounded_tokens(tokens: int) -> int:
    """Return the least `KEYS`·2^n that is no less: what takes long to compile comes up rarely."""
    return KEYS << (-(-tokens // KEYS) - 1).bit_length()


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
        self._state = tree_map(
            lambda leaf: torch.empty_like(leaf, memory_format=torch.contiguous_format), state
        )
        self._replay = self._visit
        self.runs = 0

    def run(self, state: LoopState, token_3B: Tensor) -> LoopState:
        """Return the next state; `token_3B` are tokens, steps and positions of the rows."""
        self.runs += 1
        return self._replay(token_3B, state)

    def capture(self, pool: Any) -> None:
        """Record the visit; nothing is computed. Libraries must have set themselves up by a run."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Other threads may pin memory meanwhile.
            with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                output = self._visit(self._token_3B, self._state)
        finally:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own

        def replay(token_3B: Tensor, state: LoopState) -> LoopState:
            self._token_3B.copy_(token_3B)
            tree_map(lambda kept, new: kept.copy_(new), self._state, state)
            graph.replay()
            return tree_map(torch.clone, output)  # the next replay writes there

        self._replay = replay

    def compile(self, known: dict[Any, Code]) -> None:
        """Compile the visit, or find its code among the `known`; nothing is computed."""
        inputs, before = tree_flatten(self._state)
        after = before

        def visit(token_3B: Tensor, *inputs: Tensor) -> list[Tensor]:
            nonlocal after
            outputs, after = tree_flatten(self._visit(token_3B, tree_unflatten(inputs, before)))
            return outputs

        code = compile_visit(visit, (self._token_3B, *inputs), known)

        def replay(token_3B: Tensor, state: LoopState) -> LoopState:
            inputs = (leaf.contiguous() for leaf in tree_leaves(state))
            return tree_unflatten(code(token_3B, *inputs), after)

        self._replay = replay

    def _visit(self, token_3B: Tensor, state: LoopState) -> LoopState:
        tokens_B1, _, position_B1 = token_3B.unsqueeze(2)
        context = self._stack.context_at(
            Places(position_B1, self._kind.keys, in_step=False), self._cache
        )
        step = token_3B[1] if self._kind.step is None else self._kind.step
        return self._stack.visit(
            state,
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
        self._known: dict[Any, Code] = {}
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
            keys=min(self._rounded(seen), self._cache.shape.capacity),
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

    def _rounded(self, keys: int) -> int:
        if self._stack.device.type == "cpu":
            return rounded_tokens(keys)
        return -(-keys // KEYS) * KEYS

    def _capture(self, visit: FixedVisit) -> None:
        if not self._stack.captures:
            return
        on_cpu = self._stack.device.type == "cpu"
        try:
            visit.compile(self._known) if on_cpu else visit.capture(self._pool)
        except Exception as error:  # tracers and compilers raise every kind
            self._stack.captures = False
            family, cause = self._stack.model.config.family, error.__context__ or error
            logger.warning(
                "model.family=%s with a %s cannot be %s, so the host decides its speed: %s",
                *(family, type(self._cache).__name__),
                "compiled" if on_cpu else "captured in a CUDA graph",
                (str(cause) or type(cause).__name__).splitlines()[0],
            )
