"""What follows the end of a job's step, and the clock of its steps; needs no SLURM."""

import math
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titan_loop.errors import EXIT_CRASH, EXIT_OK, EXIT_STOPPED, EXIT_USER_ERROR
from titan_loop.runs.exit_reports import RankExit
from titan_loop.slurm import job
from titan_loop.slurm.allocation import Allocation
from titan_loop.slurm.health import NodeCheck
from titan_loop.slurm.record import Restarts, read_restarts, write_restarts
from titan_loop.training.stop_request import GRACE_VARIABLE

ALLOCATION = Allocation(
    job="123", restarts=1, nodes=("n1", "n2", "n3"), ranks_per_node=2, gpus_per_node=0
)


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


@pytest.mark.parametrize(("starts", "code"), [(True, 0), (False, 137)])
def test_the_clock_of_a_check_starts_with_its_last_rank(monkeypatch, tmp_path, starts, code):
    """Importing torch on every node may take longer than the check itself."""
    check = Check(starts)
    monkeypatch.setattr(job, "time", check)
    monkeypatch.setattr(job.subprocess, "Popen", check)
    monkeypatch.setattr(job.signal, "signal", lambda number, handler: None)  # of this process
    killed: list[str] = []
    monkeypatch.setattr(job, "end_steps", killed.append)
    what = job.Job(train=(), folder=tmp_path, stage=None, save_seconds=1, check=None)
    with job._Steps(what, ALLOCATION) as steps:
        assert steps.run(["check"], os.environ, limit=400, started=check.there) == code
    assert killed == ([] if starts else ["123"])
    assert check.now == pytest.approx(600 if starts else 900, abs=1)


class Start:
    """One start of a job on two nodes, whose step ends as a test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.restarts, self.check = folder, 1, False
        self.nodes: tuple[str, ...] = ("n1", "n2")
        self.code, self.exits, self.state = 1, [], "RUNNING"
        self.checkpoints: list[dict[str, int]] = [{}, {}]
        self.bad: dict[str, str] = {}
        self.others: list[str] = []
        self.warned = False
        self.steps: list[Sequence[str]] = []
        self.settings: list[dict[str, Any]] = []
        self.excluded: list[Sequence[str]] = []
        handled: list[int] = []

        def run(steps, command, environment, limit=None, started=None):
            steps.warned = self.warned
            self.steps.append(command)
            self.settings.append({**environment, "limit": limit, "started": started})
            return self.code

        def start_again(number, *, exclude, folder, name, save_seconds):
            self.excluded.append(exclude)
            assert signal.SIGTERM in handled[2:], "SLURM's SIGTERM would end this process"
            return "requeued"

        seen = iter(range(2))
        monkeypatch.setattr(job._Steps, "run", run)
        monkeypatch.setattr(job, "start_again", start_again)
        monkeypatch.setattr(job, "read_exits", lambda reports: self.exits)
        monkeypatch.setattr(job, "bad_nodes", lambda reports, where: (self.bad, self.others))
        monkeypatch.setattr(job, "show", lambda kind, name: {"JobState": self.state})
        monkeypatch.setattr(
            job, "newest_checkpoints", lambda folder, stage: self.checkpoints[next(seen)]
        )
        monkeypatch.setattr(job.signal, "signal", lambda number, handler: handled.append(number))
        monkeypatch.setattr(job.Allocation, "current", lambda environment: self.allocation)

    @property
    def allocation(self) -> Allocation:
        return replace(ALLOCATION, nodes=self.nodes, restarts=self.restarts)

    def run(self, environment: dict[str, str] | None = None) -> int:
        check = NodeCheck() if self.check else None
        one = job.Job(
            train=("ouro",), folder=self.folder, stage="1a", save_seconds=100, check=check
        )
        return job.run_job(one, environment or {})


@pytest.fixture
def start(tmp_path, monkeypatch) -> Start:
    return Start(tmp_path, monkeypatch)


def test_a_step_that_ends_well_is_the_end(start):
    start.code = 0
    assert start.run() == EXIT_OK
    assert not start.excluded
    (command,), (settings,) = start.steps, start.settings
    assert [*command[-6:]] == [
        "train", "ouro", "--stage", "1a", "--dump-folder", str(start.folder),
    ]  # fmt: skip
    assert float(settings[GRACE_VARIABLE]) == 80


def test_any_other_end_starts_the_job_again_while_it_runs(start):
    assert start.run() == EXIT_STOPPED
    assert start.excluded == [()]


def test_a_job_that_was_cancelled_is_not_started_again(start):
    start.state = "COMPLETING"
    assert start.run() == EXIT_STOPPED
    assert not start.excluded


def test_a_mistake_of_a_rank_is_final_unless_one_node_is_to_blame(start):
    start.exits = [RankExit(2, "n2", EXIT_USER_ERROR)]
    assert start.run() == EXIT_STOPPED
    assert start.excluded == [("n2",)]
    assert read_restarts(start.folder, "1a").bad_nodes.keys() == {"n2"}


def test_a_mistake_on_the_only_node_is_final(start):
    start.nodes, start.exits = ("n1",), [RankExit(1, "n1", EXIT_USER_ERROR)]
    assert start.run() == EXIT_USER_ERROR
    assert not start.excluded


@pytest.mark.parametrize(
    ("before", "restarts", "environment", "checkpoints", "code", "steps"),
    [
        (0, 1, {}, [{}, {}], EXIT_STOPPED, 1),
        (1, 1, {}, [{}, {}], EXIT_CRASH, 1),
        (2, 1, {}, [{}, {}], EXIT_CRASH, 0),
        (1, 1, {}, [{}, {"1a": 5}], EXIT_STOPPED, 1),
        (2, 1, {}, [{"1a": 5}, {"1a": 5}], EXIT_STOPPED, 1),
        (2, 0, {}, [{}, {}], EXIT_STOPPED, 1),  # submitted anew
        (2, 0, {"TITAN_LOOP_SUCCESSOR_OF": "7"}, [{}, {}], EXIT_CRASH, 0),
    ],
)
def test_three_starts_without_a_checkpoint_are_the_end(
    start, before, restarts, environment, checkpoints, code, steps
):
    write_restarts(start.folder, "1a", Restarts(fruitless=before))
    start.restarts, start.checkpoints = restarts, checkpoints
    assert start.run(environment) == code
    assert len(start.steps) == steps


@pytest.mark.parametrize(
    ("bad", "others", "warned", "code", "excluded", "steps"),
    [
        ({}, [], False, EXIT_OK, [], 2),
        ({"n2": "full"}, [], False, EXIT_STOPPED, [("n2",)], 1),
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
    assert start.excluded == excluded
    assert len(start.steps) == steps
    settings = start.settings[0]
    assert settings["limit"] == 300
    assert "--wait=60" in start.steps[0]
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
    with job._Steps(one, ALLOCATION) as steps:
        assert not steps.warned
        handlers[signal.SIGUSR1](signal.SIGUSR1, None)
        handlers[signal.SIGUSR1](signal.SIGUSR1, None)
        assert steps.warned
        assert [each.seconds for each in timers] == [90]
        assert timers[0].daemon
        # A step that begins after the warning is told, too.
        assert steps.run(["sleep", "60"], os.environ) == 128 + signal.SIGUSR1
    assert timers[0].cancelled
