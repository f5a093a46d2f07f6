"""Meshes that the stages of a recipe share, with their process groups.

A stage makes a dozen groups, which keep buffers on GPUs. They cannot be destroyed at its end: torch
caches the specs of DTensors, so an equal mesh of a later stage could use the destroyed groups.
"""

from datetime import timedelta
from typing import Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_pg_timeouts


class KeptLayouts:
    """The meshes of one process group, by their degrees of parallelism."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], ParallelDims] = {}

    def equal_to(self, new: ParallelDims, timeout: timedelta) -> ParallelDims:
        """Return an earlier stage's equal layout, or keep and return this one; collective.

        Sets `timeout` for the first step's collectives, since an earlier stage has lowered it.
        """
        degrees = (new.dp_replicate, new.dp_shard, new.cp, new.tp, new.pp, new.ep)
        layout = self._kept.setdefault((*degrees, new.world_size, new.spmd_backend), new)
        if layout is not new:
            set_pg_timeouts(timeout, layout)
        return layout
