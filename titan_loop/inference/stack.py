"""One application of the shared stack to tokens that may be at different recurrent steps.

All steps have the same weights, so rows at steps 1, 3 and 2 go through the layers in one call; only
the cache needs to know which row is at which step. Tensor parallelism ends here, too: everything
outside sees plain tensors that are equal on all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from titan_loop.errors import UserError
from titan_loop.inference.cache import CacheShape, LoopCache
from titan_loop.models.attention import DocumentAttention, LoopAttention
from titan_loop.models.context import KeyValueCache, LoopContext
from titan_loop.models.decoder import LoopDecoder


@dataclass
class Work:
    """The cost of generating.

    Attributes:
        cache_bytes: Bytes allocated for keys and values; under tensor parallelism on this rank.
        applications: Number of calls of the whole stack.
        token_steps: Number of tokens in those calls, summed, with padding.
    """

    cache_bytes: int = 0
    applications: int = 0
    token_steps: int = 0


class Stack:
    """A looped decoder as the engine calls it; plain tensors in and out.

    Args:
        model: A model in evaluation mode; under tensor parallelism without sequence parallelism.

    Attributes:
        attention: The attention of one layer, for its shape.
        work: Cost since this record was last replaced.

    Raises:
        UserError: The model's attention cannot read a cache.
    """

    def __init__(self, model: LoopDecoder) -> None:
        attention = model.layers["0"].attention
        assert isinstance(attention, LoopAttention)
        kernel = attention.inner_attention
        if not isinstance(kernel, DocumentAttention):
            raise UserError(
                f"model.attention={type(kernel).__name__} cannot decode; build it with sdpa"
            )
        self.model = model
        self.attention = attention
        self.work = Work()
        weight = model.tok_embeddings.weight
        self.device = weight.device
        self.dtype = weight.dtype
        self._mesh: DeviceMesh | None = None
        if isinstance(weight, DTensor):
            self._mesh = weight.device_mesh

    @property
    def context_tokens(self) -> int:
        """Number of positions the rotary table covers."""
        return self.model.config.max_seq_len

    def make_cache(
        self, strategy: type[LoopCache], *, steps: int, rows: int, capacity: int
    ) -> LoopCache:
        """Allocate an empty cache; under tensor parallelism for this rank's heads."""
        ranks = 1 if self._mesh is None else self._mesh.size()
        shape = CacheShape(
            steps,
            len(self.model.layers),
            rows,
            capacity,
            self.attention.n_kv_heads // ranks,
            self.attention.head_dim,
        )
        cache = strategy(shape, dtype=self.dtype, device=self.device)
        self.work.cache_bytes += cache.allocated_bytes
        return cache

    def embed(self, tokens_BL: Tensor) -> Tensor:
        """Return h_0, (B, L, D)."""
        return self._plain(self.model.tok_embeddings(tokens_BL))

    def prompt_step(self, hidden_BLD: Tensor, step: int, cache: KeyValueCache | None) -> Tensor:
        """Run `step` on whole prompts from position 0: h_{step-1} → h_step."""
        positions_BL = torch.arange(hidden_BLD.shape[1], device=self.device)
        positions_BL = positions_BL.expand(hidden_BLD.shape[:2])
        return self._apply(hidden_BLD, [step] * len(hidden_BLD), positions_BL, None, cache)

    def token_step(
        self, hidden_BLD: Tensor, steps: Sequence[int], positions_BL: Tensor, cache: LoopCache
    ) -> Tensor:
        """Run one more step on new tokens: h_{r-1} → h_r, with each row's own r.

        Args:
            hidden_BLD: States, or the embeddings of rows at step 1.
            steps: Step r of every row.
            positions_BL: Positions of the tokens.
            cache: Cache of these rows.
        """
        seen = int(positions_BL.max()) + 1
        key_S = torch.arange(seen, device=self.device)
        mask_B1LS = (key_S <= positions_BL.unsqueeze(-1)).unsqueeze(1)
        visit = cache.tokens(positions_BL, seen)
        return self._apply(hidden_BLD, steps, positions_BL, mask_B1LS, visit)

    def readout(self, hidden_BLD: Tensor) -> Tensor:
        """Return logits (B, L, V)."""
        return self._plain(self.model.readout(self._placed(hidden_BLD)))

    def gate(self, hidden_BLD: Tensor) -> Tensor:
        """Return exit logits (B, L), fp32."""
        return self._plain(self.model.gate(self._placed(hidden_BLD)))

    def _apply(
        self,
        hidden_BLD: Tensor,
        steps: Sequence[int],
        positions_BL: Tensor,
        mask_B1LS: Tensor | None,
        cache: KeyValueCache | None,
    ) -> Tensor:
        hidden_BLD = self._between_steps(hidden_BLD, steps)
        same = min(steps) == max(steps)
        step = steps[0] if same else torch.tensor(steps, device=self.device)
        context = LoopContext(self.model.rope_table.rows(positions_BL), mask_B1LS, cache)
        self.work.applications += 1
        self.work.token_steps += positions_BL.numel()
        return self._plain(self.model.step(self._placed(hidden_BLD), step, context))

    def _between_steps(self, hidden_BLD: Tensor, steps: Sequence[int]) -> Tensor:
        """Apply what the recurrence does to a state before each row's next step."""
        for step in set(steps) - {1}:
            rows = [row for row, other in enumerate(steps) if other == step]
            whole = len(rows) == len(steps)
            before = hidden_BLD if whole else hidden_BLD[rows]
            after = self.model.recurrence.between_steps(self.model, before, step - 1)
            if after is before:
                continue
            if whole:
                return after
            hidden_BLD = hidden_BLD.clone()
            hidden_BLD[rows] = after
        return hidden_BLD

    def _placed(self, hidden: Tensor) -> Tensor:
        if self._mesh is None:
            return hidden
        return DTensor.from_local(hidden, self._mesh, [Replicate()], run_check=False)

    def _plain(self, value: Tensor) -> Tensor:
        return value.full_tensor() if isinstance(value, DTensor) else value
