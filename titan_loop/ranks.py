"""One rank looks, all ranks know: what is read from disk once and told to the others."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from titan_loop.errors import UserError

T = TypeVar("T")


def from_rank_zero(group: dist.ProcessGroup | None, look: Callable[[], T]) -> T:
    """Let rank 0 look; every rank returns what it saw, or raises what it raised.

    Args:
        group: All ranks of it call this; None looks alone.
        look: Returns something picklable; what it raises reaches all ranks, `OSError` and
            `UserError` as they are.
    """
    if group is None:
        return look()
    found: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            found[0] = look()
        except Exception as error:
            # Whatever it is: the others must not wait for a rank that has left.
            found[1] = error if isinstance(error, (OSError, UserError)) else _described(error)
    dist.broadcast_object_list(found, src=0, group=group)
    if found[1] is not None:
        raise found[1]
    return found[0]


def _described(error: Exception) -> RuntimeError:
    """Return an exception that can be pickled."""
    return RuntimeError(f"on rank 0: {type(error).__name__}: {error}")
