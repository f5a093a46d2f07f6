"""Every rank leaves an agreement in the same way: with the answer, or with what one rank raised."""

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.multiprocess import free_port, preloaded_context
from titan_loop.errors import RunFailedError, UserError
from titan_loop.ranks import (
    all_ranks,
    decided_by_rank_zero,
    from_all_ranks,
    from_rank_zero,
    meeting,
    on_rank_zero,
    try_on_all,
)


def test_alone_nothing_is_asked_of_others():
    assert all_ranks() is None
    assert from_rank_zero(None, lambda: 3) == 3
    assert on_rank_zero(None, lambda: 3) == 3
    assert from_all_ranks(None, lambda: 3) == [3]
    results, failure = try_on_all(None, lambda: 1 / 0)
    assert results == []
    assert failure is not None
    assert isinstance(failure.error, ZeroDivisionError)


def said(call) -> str:
    try:
        return repr(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def fail_on(rank: int, error: Exception) -> int:
    if dist.get_rank() == rank:
        raise error
    return dist.get_rank()


def answers() -> list[str]:
    group = all_ranks()
    return [
        said(lambda: from_rank_zero(group, dist.get_rank)),
        said(lambda: on_rank_zero(group, lambda: "kept")),
        said(lambda: from_all_ranks(group, dist.get_rank)),
        said(lambda: from_rank_zero(group, lambda: fail_on(0, UserError("wrong")))),
        said(lambda: from_rank_zero(group, lambda: fail_on(0, ValueError("broken")))),
        said(lambda: from_all_ranks(group, lambda: fail_on(1, OSError("full")))),
        said(lambda: from_all_ranks(group, lambda: fail_on(1, ValueError("broken")))),
        said(lambda: from_all_ranks(group, dist.get_rank)),  # nobody is left behind
    ]


@pytest.mark.multiprocess
def test_ranks_agree(gloo_pool):
    first, second = gloo_pool(2).run(answers)
    assert first == [
        "0",
        "'kept'",
        "[0, 1]",
        "UserError: wrong",
        "ValueError: broken",
        "OSError: full",
        "RuntimeError: rank 1: ValueError: broken",
        "[0, 1]",
    ]
    assert second == [
        "0",
        "None",
        "[0, 1]",
        "UserError: wrong",
        "RuntimeError: rank 0: ValueError: broken",
        "OSError: full",
        "ValueError: broken",
        "[0, 1]",
    ]


def test_a_port_in_use_is_one_line(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        message = f"could not meet at 127.0.0.1:{port}"
        with pytest.raises(RunFailedError, match=message) as caught, meeting():
            dist.init_process_group("gloo", rank=0, world_size=2)
    assert "\n" not in str(caught.value)


def meet(rank: int, world: int, port: int) -> None:
    """Set the environment variables that a launcher sets."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


def launched(call: Callable[..., None], arguments: list[tuple[Any, ...]]) -> list[Any]:
    """Return what ranks without a process group send to a queue, by rank; then end them."""
    context, port = preloaded_context(), free_port()
    queue = context.Queue()
    ranks = [
        context.Process(target=call, args=(queue, rank, len(arguments), port, *own))
        for rank, own in enumerate(arguments)
    ]
    for rank in ranks:
        rank.start()
    try:
        return [found for _, found in sorted(queue.get(timeout=120) for _ in ranks)]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def refuse() -> None:
    raise UserError("x=1 is wrong")


def decide(queue: Any, rank: int, world: int, port: int, view: str) -> None:
    meet(rank, world, port)
    found = [
        decided_by_rank_zero(lambda: view),
        said(lambda: decided_by_rank_zero(refuse if view == "old" else lambda: None)),
    ]
    assert not dist.is_initialized()
    dist.init_process_group("gloo")  # at the same address
    found.append(decided_by_rank_zero(lambda: view))
    queue.put((rank, found))
    dist.destroy_process_group()


@pytest.mark.multiprocess
def test_before_they_have_a_group_ranks_take_rank_zeros_view():
    """With a stale listing of its own, one would leave while the others wait for it."""
    found = launched(decide, [("old",), ("new",)])
    assert found == [["old", "UserError: x=1 is wrong", "old"]] * 2
