"""Data-parallel evaluation: every rank does its share, and every rank gets all results.

Shares may have any size. An error on one rank is raised on all, so that none waits for it.
"""

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import titan_loop.compat as compat  # before any torchtitan module
import torch
import torch.distributed as dist

from titan_loop.ranks import all_ranks, from_all_ranks, meeting, place_in

Item = TypeVar("Item")
Result = TypeVar("Result")


def join_ranks() -> tuple[int, int]:
    """Return (rank, world size); enter a group first if a launcher started several processes."""
    if not dist.is_initialized() and "RANK" in os.environ:
        rank, world_size = compat.start_runtime()
        if world_size > 1:
            with meeting():
                dist.init_process_group("gloo", rank=rank, world_size=world_size)  # objects only
    return place_in(all_ranks())


def rank_device() -> torch.device:
    """Return the device of this rank."""
    if compat.device_type() == "cpu":
        return torch.device("cpu")
    return torch.device(compat.device_type(), int(os.environ.get("LOCAL_RANK", "0")))


def share_work(
    items: Sequence[Item], work: Callable[[Sequence[Item]], list[Result]]
) -> list[Result]:
    """Return `work(items)`, of which each rank does every world-size-th item; collective.

    Args:
        items: The same on all ranks; neighbours should cost alike.
        work: Returns one picklable result per item, in order.
    """
    rank, world_size = join_ranks()
    parts = from_all_ranks(all_ranks(), lambda: work(items[rank::world_size]))
    results: list = [None] * len(items)
    for other, part in enumerate(parts):
        results[other::world_size] = part
    return results
