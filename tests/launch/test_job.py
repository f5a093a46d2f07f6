"""What follows the end of a job's step, and the clock of its steps; needs no scheduler."""

import math
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from titan_loop.errors import EXIT_CRASH, EXIT_OK, EXIT_STOPPED, EXIT_USER_ERROR
from titan_loop.launch import job
from titan_loop.launch.health import NodeCheck
from titan_loop.launch.job import final_code, lone_node
from titan_loop.launch.record import Restarts, read_restarts, write_restarts
from titan_loop.launch.scheduler import Allocation, JobStatus, Scheduler
from titan_loop.launch.site import Site
from titan_loop.runs.exit_reports import RankExit
from titan_loop.training.stop_request import GRACE_VARIABLE

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


class Check:
    """A process, and the clock of its job: it starts after 500 s and takes 100 s from then on."""

    def __init__(self, starts: bool) -> None:
        self.now, self.starts, self.killed = 0.0, starts, False

    def __call__(self, *args: object, **options: object) -> "Check":  # as Popen
        return self

    def __enter__(self) -> "Check":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def there(self) -> bool:
        return self.starts and self.now >= 500

    def poll(self) -> int | None:
        return 0 if self.starts and self.now >= 600 else None

    def wait(self, limit: float | None = None) -> int:
        if self.killed:
            return -9
        end = 600.0 if self.starts else math.inf
        if limit is not None and self.now + limit < end:
            self.now += limit
            raise subprocess.TimeoutExpired("check", limit)
        self.now = end
        return 0

    def kill(self) -> None:
        self.killed = True

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now


class Standing:
    """A scheduler that records its calls."""

    def __init__(self) -> None:
        self.where, self.now = ALLOCATION, "RUNNING"
        self.excluded: list[Sequence[str]] = []
        self.waits: list[int] = []
        self.killed: list[str] = []
        self.handled: list[int] = []

    def allocation(self, environment: Mapping[str, str]) -> Allocation:
        return self.where

    def state(self, job: str) -> JobStatus:
        return JobStatus(job, self.now)

    def step(
        self, where: Allocation, site: Site, command: Sequence[str], *, wait: int
    ) -> list[str]:
        self.waits.append(wait)
        return [*command]

    def end_steps(self, job: str) -> None:
        self.killed.append(job)

    def start_again(self, job: str, *, exclude: Sequence[str]) -> str:
        assert signal.SIGTERM in self.handled[2:], "SLURM's SIGTERM would end this process"
        self.excluded.append(exclude)
        return "requeued"


@pytest.mark.parametrize(("starts", "code"), [(True, 0), (False, 137)])
def test_the_clock_of_a_check_starts_with_its_last_rank(monkeypatch, tmp_path, starts, code):
    """Importing torch on every node may take longer than the check itself."""
    check, scheduler = Check(starts), Standing()
    monkeypatch.setattr(job, "time", check)
    monkeypatch.setattr(job.subprocess, "Popen", check)
    monkeypatch.setattr(job.signal, "signal", lambda number, handler: None)  # of this process
    what = job.Job(train=(), folder=tmp_path, stage=None, save_seconds=1, check=None)
    with job._Steps(what, ALLOCATION, cast(Scheduler, scheduler)) as steps:
        assert steps.run(["check"], os.environ, limit=400, started=check.there) == code
    assert scheduler.killed == ([] if starts else ["123"])
    assert check.now == pytest.approx(600 if starts else 900, abs=1)


class Start:
    """One start of a job on two nodes, whose step ends as a test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.check, self.scheduler = folder, False, Standing()
        self.code, self.exits = 1, []
        self.checkpoints: list[dict[str, int]] = [{}, {}]
        self.bad: dict[str, str] = {}
        self.others: list[str] = []
        self.warned = False
        self.steps: list[Sequence[str]] = []
        self.settings: list[dict[str, Any]] = []

        def run(steps, command, environment, limit=None, started=None):
            steps.warned = self.warned
            self.steps.append(command)
            self.settings.append({**environment, "limit": limit, "started": started})
            return self.code

        seen = iter(range(2))
        monkeypatch.setattr(job._Steps, "run", run)
        monkeypatch.setattr(job, "read_exits", lambda reports: self.exits)
        monkeypatch.setattr(job, "bad_nodes", lambda reports, where: (self.bad, self.others))
        monkeypatch.setattr(
            job, "newest_checkpoints", lambda folder, stage: self.checkpoints[next(seen)]
        )
        monkeypatch.setattr(
            job.signal, "signal", lambda number, handler: self.scheduler.handled.append(number)
        )

    def run(self) -> int:
        check = NodeCheck() if self.check else None
        one = job.Job(
            train=("ouro",), folder=self.folder, stage="1a", save_seconds=100, check=check
        )
        return job.run_job(one, cast(Scheduler, self.scheduler), {})


@pytest.fixture
def start(tmp_path, monkeypatch) -> Start:
    return Start(tmp_path, monkeypatch)


def test_a_step_that_ends_well_is_the_end(start):
    start.code = 0
    assert start.run() == EXIT_OK
    assert not start.scheduler.excluded
    (command,), (settings,) = start.steps, start.settings
    assert command == ["train", "ouro", "--stage", "1a", "--dump-folder", str(start.folder)]
    assert float(settings[GRACE_VARIABLE]) == 80
    assert start.scheduler.waits == [40]


@pytest.mark.parametrize(
    ("state", "nodes", "exits", "code", "excluded"),
    [
        ("RUNNING", 2, [], EXIT_STOPPED, [()]),
        ("COMPLETING", 2, [], EXIT_STOPPED, []),  # it was cancelled
        ("RUNNING", 2, [RankExit(2, "n2", EXIT_USER_ERROR)], EXIT_STOPPED, [("n2",)]),
        ("RUNNING", 1, [RankExit(1, "n1", EXIT_USER_ERROR)], EXIT_USER_ERROR, []),
    ],
)
def test_any_other_end_starts_the_job_again_while_it_runs(
    start, state, nodes, exits, code, excluded
):
    start.scheduler.now, start.exits = state, exits
    start.scheduler.where = replace(ALLOCATION, nodes=ALLOCATION.nodes[:nodes])
    assert start.run() == code
    assert start.scheduler.excluded == excluded
    assert [*read_restarts(start.folder, "1a").bad_nodes] == [n for part in excluded for n in part]


@pytest.mark.parametrize(
    ("before", "restarts", "checkpoints", "code", "steps"),
    [
        (0, 1, [{}, {}], EXIT_STOPPED, 1),
        (1, 1, [{}, {}], EXIT_CRASH, 1),
        (2, 1, [{}, {}], EXIT_CRASH, 0),
        (1, 1, [{}, {"1a": 5}], EXIT_STOPPED, 1),
        (2, 1, [{"1a": 5}, {"1a": 5}], EXIT_STOPPED, 1),
        (2, 0, [{}, {}], EXIT_STOPPED, 1),  # submitted anew
    ],
)
def test_three_starts_without_a_checkpoint_are_the_end(
    start, before, restarts, checkpoints, code, steps
):
    write_restarts(start.folder, "1a", Restarts(fruitless=before))
    start.scheduler.where = replace(ALLOCATION, restarts=restarts)
    start.checkpoints = checkpoints
    assert start.run() == code
    assert len(start.steps) == steps


@pytest.mark.parametrize(
    ("bad", "others", "warned", "code", "excluded", "steps"),
    [
        ({}, [], False, EXIT_OK, [], 2),
        ({"n2": "full"}, ["slow"], False, EXIT_STOPPED, [("n2",)], 1),
        ({}, ["slow"], False, EXIT_CRASH, [], 1),
        ({"n1": "full", "n2": "full"}, [], False, EXIT_CRASH, [], 1),
        ({"n2": "full"}, [], True, EXIT_STOPPED, [()], 1),  # the time limit came first
    ],
)
def test_nodes_are_checked_before_training(start, bad, others, warned, code, excluded, steps):
    start.check, start.code, start.warned = True, 0, warned
    start.bad, start.others = bad, others
    assert start.run() == code
    assert start.scheduler.excluded == excluded
    assert len(start.steps) == steps
    settings = start.settings[0]
    assert (settings["limit"], start.scheduler.waits[0]) == (300, 60)
    reports = start.folder / "slurm" / "check-123-1"
    reports.mkdir(parents=True)
    for rank in range(4):
        assert not settings["started"]()
        (reports / f"rank-{rank}.json").touch()
    assert settings["started"]()


def test_a_warning_is_passed_on_once_and_then_the_ranks_are_killed(monkeypatch, tmp_path):
    timers: list[Any] = []

    def timer(seconds: float, kill: Any) -> Any:
        timers.append(SimpleNamespace(seconds=seconds, kill=kill, cancelled=False))
        timers[-1].start = lambda: None
        timers[-1].cancel = lambda: setattr(timers[-1], "cancelled", True)
        return timers[-1]

    handlers: dict[int, Any] = {}
    monkeypatch.setattr(job.threading, "Timer", timer)
    monkeypatch.setattr(job.signal, "signal", handlers.__setitem__)
    one = job.Job(train=(), folder=tmp_path, stage=None, save_seconds=100, check=None)
    with job._Steps(one, ALLOCATION, cast(Scheduler, Standing())) as steps:
        for _ in range(2):
            handlers[signal.SIGUSR1](signal.SIGUSR1, None)
        assert steps.warned
        assert [each.seconds for each in timers] == [90]
        # A step that begins after the warning is told, too.
        assert steps.run(["sleep", "60"], os.environ) == 128 + signal.SIGUSR1
    assert timers[0].cancelled
