"""Every rank leaves an agreement in the same way: with the answer, or with what one rank raised."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from titan_loop.errors import RunFailedError, UserError
from titan_loop.ranks import (
    all_ranks,
    from_all_ranks,
    from_rank_zero,
    meeting,
    on_rank_zero,
    try_on_all,
)
from titan_loop.runs.run_directory import RunDirectory


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


def claim(folder: Path) -> tuple[bool, bool]:
    lock = on_rank_zero(all_ranks(), RunDirectory(folder).lock)
    holds = lock is not None
    if lock is not None:
        lock.release()
    return holds, (folder / "run.lock").exists()


@pytest.mark.multiprocess
def test_rank_zero_holds_the_lock_of_a_run_for_all(gloo_pool, tmp_path):
    assert gloo_pool(2).run(claim, tmp_path) == [(True, True), (False, True)]
    (tmp_path / "run").write_text("a file")
    for message in gloo_pool(2).run(refusal_to_claim, tmp_path / "run"):
        assert "cannot be written" in message


def refusal_to_claim(folder: Path) -> str:
    return said(lambda: on_rank_zero(all_ranks(), RunDirectory(folder).lock))


def test_a_port_in_use_is_one_line(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        message = f"could not meet at 127.0.0.1:{port}"
        with pytest.raises(RunFailedError, match=message) as caught, meeting():
            dist.init_process_group("gloo", rank=0, world_size=2)
    assert "\n" not in str(caught.value)


DECIDE = """
import os
import torch
import torch.distributed as dist
from titan_loop.errors import UserError
from titan_loop.ranks import decided_by_rank_zero

def refuse():
    raise UserError("x=1 is wrong")

view = os.environ["VIEW"]
found = [decided_by_rank_zero(lambda: view)]
try:
    decided_by_rank_zero(refuse if view == "old" else lambda: None)
except UserError as error:
    found.append(str(error))
assert not dist.is_initialized()
dist.init_process_group("gloo")  # at the same address
found.append(decided_by_rank_zero(lambda: view))
print(found)
dist.destroy_process_group()
"""


PER_NODE = """
import os
from pathlib import Path
import titan_loop.ranks as ranks
from titan_loop.errors import UserError

ranks._LONGEST_LOOK, ranks._LOOK_SECONDS = ranks.timedelta(seconds=0.5), 0.01
folder, rank = Path(os.environ["FOLDER"]), os.environ["RANK"]

def work():
    if rank == "2":  # as long as it takes until the node of rank 0 is done
        while not (folder / "0").exists():
            pass
        ranks.time.sleep(1.0)  # longer than any wait for rank 0's decision
    (folder / rank).touch()

ranks.once_per_node(work)
found = sorted(path.name for path in folder.iterdir())
try:
    ranks.once_per_node(lambda: (_ for _ in ()).throw(UserError("x=1 is wrong")))
except UserError as error:
    found.append(str(error))
print(found)
ranks.once_per_node(lambda: None)  # nobody leaves before all have heard
"""


@pytest.mark.multiprocess
def test_one_rank_of_every_node_works_and_all_wait_without_a_limit(tmp_path):
    """Two nodes of two ranks; the second node takes longer than a wait for a decision may."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PER_NODE],
            env={
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "FOLDER": str(tmp_path),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]  # fmt: skip
    answers = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert answers == ["['0', '2', 'x=1 is wrong']\n"] * 4


@pytest.mark.multiprocess
def test_before_they_have_a_group_ranks_take_rank_zeros_view():
    """With a stale listing of its own, one would leave while the others wait for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DECIDE],
            env={
                **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "VIEW": view,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, view in enumerate(("old", "new"))
    ]  # fmt: skip
    answers = [rank.communicate()[0] for rank in ranks]
    assert answers == ["['old', 'x=1 is wrong', 'old']\n"] * 2
