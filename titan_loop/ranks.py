"""Agreement between ranks: what one of them finds out, or fails at, all of them know.

A rank that raises while its peers wait in a collective leaves them hanging. Everything here is
collective over a group, whose ranks all call it, and every rank leaves it in the same way: with the
answer, or with the exception of the rank that failed. A group of None is this process alone.
"""

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from titan_loop.errors import RunFailedError, UserError, first_line

T = TypeVar("T")

_LONGEST_LOOK = timedelta(hours=2)  # rank 0 may have to fetch a checkpoint
_store: Any = None
_decisions = 0


class Failure(NamedTuple):
    """The exception of one rank.

    On other ranks it is the same `UserError`, `RunFailedError` or `OSError`, and a description of
    anything else, which might not survive the journey.
    """

    rank: int
    error: Exception


@contextmanager
def meeting() -> Iterator[None]:
    """Say in one line that the ranks could not meet, in the block that joins their group.

    Raises:
        RunFailedError: The port is taken, or a rank or the network is missing: starting again may
            do.
    """
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        address = ":".join(os.environ.get(f"MASTER_{name}", "?") for name in ("ADDR", "PORT"))
        raise RunFailedError(
            f"the ranks could not meet at {address} ({first_line(error):.200}); choose a free "
            "port, or look for the rank that is missing"
        ) from error


def all_ranks() -> dist.ProcessGroup | None:
    """Return the group of all ranks; None if this process has not joined one."""
    return dist.group.WORLD if dist.is_initialized() else None


def from_rank_zero(group: dist.ProcessGroup | None, look: Callable[[], T]) -> T:
    """Let rank 0 look; every rank returns what it saw, or raises what it raised.

    Args:
        group: The ranks.
        look: Returns something that can be pickled.
    """
    if group is None:
        return look()
    found: list[Any] = [None, None]
    own: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            found[0] = look()
        except Exception as error:  # whatever it is: the others must not wait for this rank
            own, found[1] = error, _portable(error, 0)
    dist.broadcast_object_list(found, src=0, group=group)
    if found[1] is not None:
        raise own or found[1]
    return found[0]


def decided_by_rank_zero(look: Callable[[], T]) -> T:
    """Return what rank 0 sees, as `from_rank_zero` over all ranks; also before they have a group.

    Then the launcher's store carries the answer: ranks that each looked for themselves might decide
    differently, and some would leave while the others wait for them.
    """
    global _store, _decisions
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return from_rank_zero(all_ranks(), look)
    if _store is None:  # kept: it may be this process that serves it
        _store = next(iter(rendezvous("env://")))[0]
        _store.set_timeout(_LONGEST_LOOK)
    _decisions += 1
    key = f"titan_loop/decision-{_decisions}"
    if int(os.environ["RANK"]) != 0:
        found, error = pickle.loads(_store.get(key))  # from this run's own rank 0
        if error is not None:
            raise error
        return found
    try:
        found = look()
    except Exception as error:
        _store.set(key, pickle.dumps((None, _portable(error, 0))))
        raise
    _store.set(key, pickle.dumps((found, None)))
    return found


def on_rank_zero(group: dist.ProcessGroup | None, act: Callable[[], T]) -> T | None:
    """Let rank 0 act; its result, such as a lock, stays there, and other ranks return None.

    If it raises, every rank raises the same.
    """
    results: list[T] = []
    from_rank_zero(group, lambda: results.append(act()))
    return results[0] if results else None


def try_on_all(
    group: dist.ProcessGroup | None, work: Callable[[], T]
) -> tuple[list[T], Failure | None]:
    """Let every rank work; return all results in the order of ranks, or the first failure.

    Args:
        group: The ranks.
        work: Returns something that can be pickled.

    Returns:
        The results and None, or an empty list and the failure of the lowest rank that failed.
    """
    rank = 0 if group is None else dist.get_rank(group)
    mine: tuple[Any, Failure | None]
    try:
        mine = work(), None
    except Exception as error:
        mine = None, Failure(rank, error)
    gathered = [mine]
    if group is not None:
        result, failed = mine
        portable = (result, failed and Failure(rank, _portable(failed.error, rank)))
        gathered = [portable] * dist.get_world_size(group)
        dist.all_gather_object(gathered, portable, group=group)
        gathered[rank] = mine
    failure = next((failure for _, failure in gathered if failure is not None), None)
    results: list[Any] = [] if failure else [result for result, _ in gathered]
    return results, failure


def from_all_ranks(group: dist.ProcessGroup | None, work: Callable[[], T]) -> list[T]:
    """Let every rank work; return all results in the order of ranks, or raise the first failure."""
    if group is None:
        return [work()]
    results, failure = try_on_all(group, work)
    if failure is not None:
        raise failure.error
    return results


def _portable(error: Exception, rank: int) -> Exception:
    """Return an exception that can be pickled."""
    if isinstance(error, (OSError, RunFailedError, UserError)):
        return error
    return RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")
