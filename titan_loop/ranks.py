"""Agreement between ranks: a result or a failure of one rank reaches all of them.

A rank that raises while its peers wait in a collective leaves them hanging. Everything here is
collective over a group, and every rank leaves it in the same way: with the answer, or with the
exception of the rank that failed. A group of None is this process alone.
"""

import logging
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from titan_loop.errors import RunFailedError, UserError, first_line

if TYPE_CHECKING:
    import torch.distributed as dist  # seconds that a command without ranks does not spend

T = TypeVar("T")

_LONGEST_LOOK = timedelta(hours=2)  # rank 0 may have to fetch a checkpoint
_store: Any = None
_numbers = count(1)


class Failure(NamedTuple):
    """The exception of one rank; other ranks get a description if it might not survive pickling."""

    rank: int
    error: Exception


@contextmanager
def meeting() -> Iterator[None]:
    """Raise a `RunFailedError` of one line if ranks cannot meet: another start may succeed."""
    import torch.distributed as dist

    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        address = ":".join(os.environ.get(f"MASTER_{name}", "?") for name in ("ADDR", "PORT"))
        raise RunFailedError(
            f"the ranks could not meet at {address} ({first_line(error):.200}); choose a free "
            "port, or look for the rank that is missing"
        ) from error


def warn_together(logger: logging.Logger, message: str, *values: object) -> None:
    """Log a warning that all ranks have in common, on rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning(message, *values, stacklevel=2)


def all_ranks() -> "dist.ProcessGroup | None":
    """Return the group of all ranks; None if this process has not joined one."""
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_initialized() else None


def place_in(group: "dist.ProcessGroup | None") -> tuple[int, int]:
    """Return this process's rank in a group and the number of its ranks."""
    if group is None:
        return 0, 1

    import torch.distributed as dist

    return dist.get_rank(group), dist.get_world_size(group)


def from_rank_zero(group: "dist.ProcessGroup | None", look: Callable[[], T]) -> T:
    """Call `look` on rank 0; every rank returns its result (a pickle), or raises its exception."""
    if group is None:
        return look()

    import torch.distributed as dist

    result, own = _outcome(look) if dist.get_rank(group) == 0 else (None, None)
    found: list[Any] = [result, _portable(own, 0)]
    dist.broadcast_object_list(found, src=0, group=group)
    if found[1] is not None:
        raise own or found[1]
    return found[0]


def decided_by_rank_zero(look: Callable[[], T]) -> T:
    """Return rank 0's answer on all ranks, as `from_rank_zero`, also before they have a group.

    Without a group the launcher's store carries the answer. If every rank looked for itself, they
    might decide differently, and some would leave while the others wait for them.
    """
    import torch.distributed as dist

    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return from_rank_zero(all_ranks(), look)
    store, key = _launchers_store(), _next_key("decision")
    if int(os.environ["RANK"]) == 0:
        found, error = _outcome(look)
        store.set(key, pickle.dumps((found, _portable(error, 0))))
    else:
        found, error = pickle.loads(store.get(key))  # from this run's own rank 0
    if error is not None:
        raise error
    return found


def on_rank_zero(group: "dist.ProcessGroup | None", act: Callable[[], T]) -> T | None:
    """Let rank 0 act, or all ranks raise its exception; the result, such as a lock, stays there."""
    results: list[T] = []
    from_rank_zero(group, lambda: results.append(act()))
    return results[0] if results else None


def require_equal(group: "dist.ProcessGroup | None", value: str, called: str) -> None:
    """Raise `RunFailedError` on all ranks if any differs from rank 0: its disk may be stale."""
    values = from_all_ranks(group, lambda: value)
    if others := [str(rank) for rank, each in enumerate(values) if each != values[0]]:
        raise RunFailedError(
            f"{called} of rank {', '.join(others)} differs from rank 0's; compare the files and "
            "the code that their nodes see, and start again"
        )


def try_on_all(
    group: "dist.ProcessGroup | None", work: Callable[[], T]
) -> tuple[list[T], Failure | None]:
    """Let every rank work; return all results in the order of ranks, and None.

    If any fails, return an empty list, and the failure of the lowest such rank.
    """
    rank, world_size = place_in(group)
    mine: tuple[Any, Exception | None] = _outcome(work)
    gathered = [mine]
    if group is not None:
        import torch.distributed as dist

        portable = (mine[0], _portable(mine[1], rank))
        gathered = [portable] * world_size
        dist.all_gather_object(gathered, portable, group=group)
        gathered[rank] = mine
    for failed, (_, error) in enumerate(gathered):
        if error is not None:
            return [], Failure(failed, error)
    return [result for result, _ in gathered], None


def from_all_ranks(group: "dist.ProcessGroup | None", work: Callable[[], T]) -> list[T]:
    """Let every rank work; return all results in the order of ranks, or raise the first failure."""
    results, failure = try_on_all(group, work)
    if failure is not None:
        raise failure.error
    return results


def _next_key(kind: str) -> str:
    """Return a key of the store that no earlier call had; ranks call it in the same order."""
    return f"titan_loop/{kind}-{next(_numbers)}"


def _launchers_store() -> Any:
    from torch.distributed.rendezvous import rendezvous

    global _store
    if _store is None:  # kept: it may be this process that serves it
        _store = next(iter(rendezvous("env://")))[0]
        _store.set_timeout(_LONGEST_LOOK)
    return _store


def _outcome(work: Callable[[], object]) -> tuple[Any, Exception | None]:
    """Return a result, or any exception: the others must not wait for this rank."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def _portable(error: Exception | None, rank: int) -> Exception | None:
    if error is None or isinstance(error, (OSError, RunFailedError, UserError)):
        return error
    return RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")
