"""What follows the end of a job's step, and the limits of its steps; needs no scheduler."""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from titan_loop.errors import EXIT_CRASH, EXIT_OK, EXIT_STOPPED, EXIT_USER_ERROR
from titan_loop.launch import job
from titan_loop.launch.job import final_code, lone_node
from titan_loop.launch.node_check import NodeCheck
from titan_loop.launch.record import read_restarts
from titan_loop.launch.scheduler import Allocation, JobStatus, Scheduler
from titan_loop.launch.site import Site
from titan_loop.runs.exit_reports import RankExit

ALLOCATION = Allocation(
    job="123", restarts=1, nodes=("n1", "n2"), ranks_per_node=2, gpus_per_node=0
)


@pytest.mark.parametrize(
    ("code", "exits", "final"),
    [
        (0, [0, 0], 0),
        (75, [75, 75], None),  # stopped and saved
        (134, [75], None),  # a hung rank's peer aborted
        (75, [75, 1], None),
        (138, [], None),  # died of SIGUSR1 before Python could handle it
        (134, [0], None),  # complete, but a rank aborted on its way out
        (2, [2, 2], 2),
        (137, [2], 2),  # the others waited for it and were killed
        (134, [75, 3], 3),
        (130, [], 130),
    ],
)
def test_which_exits_have_a_job_started_again(code, exits, final):
    reports = [RankExit(rank, f"n{rank}", exit) for rank, exit in enumerate(exits)]
    assert final_code(code, reports) == final


@pytest.mark.parametrize(
    ("mistaken", "lone"),
    [
        ([(3, "n2")], "n2"),
        ([(2, "n2"), (3, "n2")], "n2"),
        ([(0, "n1"), (1, "n1")], ""),  # rank 0 says so
        ([(3, "n2"), (4, "n3")], ""),  # two nodes do
        ([(3, "")], ""),  # its node is unknown
    ],
)
def test_a_mistake_of_one_node_without_rank_zero_is_the_nodes(mistaken, lone):
    exits = [RankExit(rank, node, 2) for rank, node in mistaken] + [RankExit(9, "n9", 75)]
    assert lone_node(exits) == lone
    assert final_code(143, exits) == (None if lone else 2)
    assert final_code(143, [*exits, RankExit(8, "n8", 3)]) == (3 if lone else 2)


class Standing:
    """A scheduler that records its calls; its steps end with `code`."""

    def __init__(self) -> None:
        self.where, self.now, self.code = ALLOCATION, "RUNNING", 1
        self.steps: list[str] = []
        self.excluded: list[Sequence[str]] = []
        self.killed: list[str] = []

    def allocation(self, environment: Mapping[str, str]) -> Allocation:
        return self.where

    def state(self, job: str) -> JobStatus:
        return JobStatus(job, self.now)

    def step(
        self, where: Allocation, site: Site, command: Sequence[str], *, wait: int
    ) -> list[str]:
        self.steps.append(command[0])
        return ["sh", "-c", f"exit {self.code}"]

    def end_steps(self, job: str) -> None:
        self.killed.append(job)

    def start_again(self, job: str, *, exclude: Sequence[str]) -> str:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN  # SLURM's comes at once
        self.excluded.append(exclude)
        return "requeued"


@pytest.fixture
def scheduler(monkeypatch) -> Iterator[Standing]:
    """A scheduler; the signals of this process are its own again after the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    monkeypatch.setattr(job, "_POLL_SECONDS", 0.01)
    yield Standing()
    for number, handler in before.items():
        signal.signal(number, handler)


def one_job(folder: Path, check: NodeCheck | None = None, save_seconds: float = 100) -> job.Job:
    return job.Job(
        train=("ouro",), folder=folder, stage="1a", save_seconds=int(save_seconds), check=check
    )


@pytest.mark.parametrize(
    ("starts", "seconds", "code"), [(False, 60, 137), (True, 60, 137), (True, 0, 0)]
)
def test_a_check_must_start_and_then_end_in_time(
    scheduler, monkeypatch, tmp_path, starts, seconds, code
):
    """Importing torch on every node may take longer than the check itself."""
    monkeypatch.setattr(job, "_START_SECONDS", 60 if starts else 0.2)
    with job._Steps(
        one_job(tmp_path, save_seconds=1), ALLOCATION, cast(Scheduler, scheduler)
    ) as steps:
        command = ["sleep", str(seconds)]
        limit = 0.2 if seconds else 60.0
        assert steps.run(command, os.environ, limit=limit, started=lambda: starts) == code
    assert scheduler.killed == ([] if code == 0 else ["123"])


def test_a_warning_is_passed_on_and_then_the_ranks_are_killed(scheduler, monkeypatch, tmp_path):
    monkeypatch.setattr(job, "STEP_SHARE", 0.2)
    one = one_job(tmp_path, save_seconds=1)
    with job._Steps(one, ALLOCATION, cast(Scheduler, scheduler)) as steps:

        def warn() -> bool:
            if (tmp_path / "deaf").exists() and not steps.warned:
                signal.raise_signal(signal.SIGUSR1)
            return steps.warned

        deaf = ["sh", "-c", f"trap '' USR1; touch {tmp_path}/deaf; exec sleep 60"]
        code = steps.run(deaf, os.environ, limit=60.0, started=warn)
        assert code == 128 + signal.SIGKILL
        # A step that begins after the warning is told, too.
        assert steps.run(["sleep", "60"], os.environ) == 128 + signal.SIGUSR1
    assert scheduler.killed == ["123"]


def run(scheduler: Standing, folder: Path, check: NodeCheck | None = None) -> int:
    return job.run_job(one_job(folder, check), cast(Scheduler, scheduler), {})


@pytest.mark.parametrize(
    ("state", "nodes", "exits", "code", "excluded"),
    [
        ("RUNNING", 2, [], EXIT_STOPPED, [()]),
        ("COMPLETING", 2, [], EXIT_STOPPED, []),  # it was cancelled
        ("RUNNING", 2, [RankExit(2, "n2", EXIT_USER_ERROR)], EXIT_STOPPED, [("n2",)]),
        ("RUNNING", 1, [RankExit(1, "n1", EXIT_USER_ERROR)], EXIT_USER_ERROR, []),
    ],
)
def test_a_job_starts_again_while_it_runs(
    scheduler, tmp_path, monkeypatch, state, nodes, exits, code, excluded
):
    monkeypatch.setattr(job, "read_exits", lambda reports: exits)
    scheduler.now, scheduler.where = state, replace(ALLOCATION, nodes=ALLOCATION.nodes[:nodes])
    assert run(scheduler, tmp_path) == code
    assert scheduler.excluded == excluded
    assert [*read_restarts(tmp_path, "1a").bad_nodes] == [n for part in excluded for n in part]


@pytest.mark.parametrize(
    ("bad", "others", "code", "excluded"),
    [
        ({}, [], EXIT_OK, []),
        ({"n2": "full"}, ["slow"], EXIT_STOPPED, [("n2",)]),
        ({}, ["slow"], EXIT_CRASH, []),
        ({"n1": "full", "n2": "full"}, [], EXIT_CRASH, []),
    ],
)
def test_nodes_are_checked_before_training(
    scheduler, tmp_path, monkeypatch, bad, others, code, excluded
):
    monkeypatch.setattr(job, "bad_nodes", lambda reports, where: (bad, others))
    scheduler.code = 0
    assert run(scheduler, tmp_path, NodeCheck()) == code
    assert scheduler.excluded == excluded
    assert scheduler.steps == (["slurm"] if bad or others else ["slurm", "train"])
