"""A run that hangs inside a step names the rank that the others wait for."""

import contextlib
import io
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from titan_loop.runs import heartbeats
from titan_loop.runs.heartbeats import forget_heartbeats, read_heartbeats
from titan_loop.training.stability.heartbeat import Pulse

MOST_SECONDS = 300.0
HEARTBEAT_SECONDS = 0.02


def hang_case(run: Path) -> list[str]:
    """The last rank stays outside of a sum until the others' beats say that they wait in it.

    Rank 0, which speaks for all in training, waits in the sum: here the last rank plays its part.

    Returns:
        Lines that this rank prints.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        forget_heartbeats(run)
    pulse = Pulse(run, rank=rank, seconds=HEARTBEAT_SECONDS)
    dist.barrier()
    pulse.enter(3, "reading data")
    printed = io.StringIO()
    if rank == ranks - 1:
        _wait_until_beats(run, waiting=ranks - 1, ranks=ranks)
    else:
        pulse.enter(3, "update")
    # On a slow machine a beat may be late; a late rank would be named as silent.
    patient = mock.patch.object(heartbeats, "_PATIENCE", MOST_SECONDS / HEARTBEAT_SECONDS)
    with contextlib.redirect_stderr(printed), patient:
        if rank == ranks - 1:
            pulse.on_hang()  # says nothing: this is not rank 0
            Pulse(run, rank=0, seconds=1.0).on_hang()
    dist.all_reduce(torch.ones(()))
    pulse.close()
    return printed.getvalue().splitlines()


def _wait_until_beats(run: Path, *, waiting: int, ranks: int) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while time.monotonic() < deadline:
        beats = read_heartbeats(run)
        if len(beats) == ranks and sum(bool(beat.collective) for beat in beats) == waiting:
            return
    raise AssertionError(f"the others do not wait: {read_heartbeats(run)}")


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [4])
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
