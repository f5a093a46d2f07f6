"""A run that hangs inside a step names the rank that the others wait for."""

import contextlib
import io
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from titan_loop.runs import heartbeats
from titan_loop.runs.heartbeats import read_heartbeats
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.stability.config import StabilityConfig
from titan_loop.training.stability.guard import Guard

MOST_SECONDS = 300.0
HEARTBEAT_SECONDS = 0.02


def hang_case(run: Path) -> list[str]:
    """The last rank stays outside of a sum until the others' beats say that they wait in it.

    Rank 0, which speaks for all in training, waits in the sum: here the last rank plays its part.

    Returns:
        Lines that this rank prints.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    guard = Guard(
        StabilityConfig(heartbeat_seconds=HEARTBEAT_SECONDS),
        model=cast(Any, SimpleNamespace(dim=8, layers=[])),
        recurrent_steps=2,
        device=torch.device("cpu"),
        window_tokens=8,
        run=RunDirectory(run),
        writes=rank == 0,
        max_skipped_steps=1,
    )
    dist.barrier()  # rank 0 has deleted older heartbeats
    guard.begin(3, [])
    printed = io.StringIO()
    if rank == ranks - 1:
        guard.enter("reading data")
        _wait_until_beats(run, waiting=ranks - 1, ranks=ranks)
    else:
        guard.enter("update")
    # On a slow machine a beat may be late; a late rank would be named as silent.
    patient = mock.patch.object(heartbeats, "_PATIENCE", MOST_SECONDS / HEARTBEAT_SECONDS)
    with contextlib.redirect_stderr(printed), patient:
        if rank == ranks - 1:
            guard.name_silent_ranks()  # says nothing: this is not rank 0
            guard._writes = True
            guard.name_silent_ranks()
    dist.all_reduce(torch.ones(()))
    guard.close()
    return printed.getvalue().splitlines()


def _wait_until_beats(run: Path, *, waiting: int, ranks: int) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while time.monotonic() < deadline:
        beats = read_heartbeats(run)
        if len(beats) == ranks and sum(bool(beat.collective) for beat in beats) == waiting:
            return
    raise AssertionError(f"the others do not wait: {read_heartbeats(run)}")


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_hang_inside_a_step_names_rank_phase_and_collective_in_one_line(
    gloo_pool, tmp_path, ranks
):
    stale = tmp_path / "heartbeats" / "rank-300.json"
    stale.parent.mkdir()
    stale.write_text("{}")
    *others, (line,) = gloo_pool(ranks).run(hang_case, tmp_path)
    assert not stale.exists()
    assert others == [[]] * (ranks - 1)
    assert line.startswith(f"titan-loop: rank {ranks - 1} on ")
    assert "is in no collective, in reading data of step 3, for " in line
    assert f"; {ranks - 1} other ranks wait in gloo:all_reduce " in line
    assert not read_heartbeats(tmp_path)
