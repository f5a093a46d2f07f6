"""Separate attention for each recurrent step, in a layer whose experts all steps share.

    step r:  attention_min(r, S)(x),   S = `model.attentions`

An attention is a whole module: projections, and a table of scores where positions have one. Keys
and values stand in the cache by (step, layer), as with one attention.

Source: "How to loop MoE", arXiv 2609.35751: experts of all steps in one pool, attention tied or
untied.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torchtitan.protocols.module import ModuleList

from titan_loop.models.attention import LoopAttention
from titan_loop.models.context import CacheSlot, LoopContext


class StepAttention(LoopAttention):
    """One attention per step; the last one serves all further steps."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoopAttention.Config):
        """Attention of step 1, and of every later one."""

        later: LoopAttention.Config
        attentions: int

        @classmethod
        def of(cls, one: LoopAttention.Config, attentions: int) -> "StepAttention.Config":
            """Return `attentions` attentions of the same shape."""
            shape = {each.name: getattr(one, each.name) for each in fields(one)}
            return cls(**shape, later=one, attentions=attentions)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.later = ModuleList(config.later.build() for _ in range(config.attentions - 1))

    def forward(  # type: ignore[override]
        self, x_BLD: Tensor, context: LoopContext, cache_slot: CacheSlot | None = None
    ) -> Tensor:
        """Attend as the step of `cache_slot` does; arguments as in `LoopAttention.forward`."""
        assert cache_slot is not None
        step = cache_slot.step
        if isinstance(step, Tensor):
            return self._rows(x_BLD, context, cache_slot, step.clamp(max=1 + len(self.later)) - 1)
        index = min(step or 1, 1 + len(self.later)) - 1
        if index:
            return self.later[index - 1](x_BLD, context, cache_slot)
        return super().forward(x_BLD, context, cache_slot)

    def _rows(
        self, x_BLD: Tensor, context: LoopContext, slot: CacheSlot, index_B: Tensor
    ) -> Tensor:
        """Attend with rows at different steps: all attentions compute, each row keeps its own."""
        assert context.cache is not None
        row_B = torch.arange(len(index_B), device=index_B.device)

        def own(found: list[Tensor]) -> Tensor:
            return torch.stack(found)[index_B, row_B]

        each: list[Any] = [super().forward, *self.later]
        project = [super()._projected, *(later._projected for later in self.later)]
        uncached = context._replace(cache=None)
        # The cache takes each row's own keys and values first; then every attention reads it.
        _, keys, values = zip(*(one(x_BLD, uncached, slot) for one in project), strict=True)
        stored = _Stored(*context.cache.update(slot, own([*keys]), own([*values])))
        seeing = context._replace(cache=stored)
        return own([one(x_BLD, seeing, slot) for one in each])


class _Stored:
    """A cache that holds the new tokens' keys and values already."""

    def __init__(self, k_BSNH: Tensor, v_BSNH: Tensor) -> None:
        self._found = k_BSNH, v_BSNH

    def update(self, slot: CacheSlot, k_BLNH: Tensor, v_BLNH: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values to attend to."""
        return self._found
