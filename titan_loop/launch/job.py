"""A training job: it checks its nodes, trains, and has the scheduler start it again.

    SIGUSR1 from the scheduler ─► ranks save and exit with code 75; late ones are killed
    code 0 ─► the next stage's job begins
    code 2, 3, 4 or 130 (mistake, non-finite, unstable, interrupt) of a rank ─► the chain ends
    code 2 on one node only, and not on rank 0 ─► that node is bad
    any other code, or a bad node ─► started again, until three in a row save no new checkpoint

The process replaces the shell of the batch step, so that `--signal=B:USR1@…` reaches it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from titan_loop.errors import (
    EXIT_CRASH,
    EXIT_INTERRUPTED,
    EXIT_NON_FINITE,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_UNSTABLE,
    EXIT_USER_ERROR,
)
from titan_loop.launch.node_check import NodeCheck, bad_nodes
from titan_loop.launch.record import (
    Restarts,
    is_newer,
    newest_checkpoints,
    read_restarts,
    records_folder,
    write_restarts,
)
from titan_loop.launch.scheduler import RUNNING, Allocation, Scheduler, SchedulerError
from titan_loop.launch.site import Site
from titan_loop.runs.exit_reports import REPORTS_VARIABLE, RankExit, describe_exits, read_exits
from titan_loop.training.stop_request import GRACE_VARIABLE

FINAL_EXIT_CODES = (EXIT_USER_ERROR, EXIT_NON_FINITE, EXIT_UNSTABLE, EXIT_INTERRUPTED)
"""Exit codes of failures that another start would repeat, and of an interrupt."""

FRUITLESS_STARTS = 3
RANKS_SHARE, STEP_SHARE = 0.8, 0.9
"""Shares of `save_seconds` after which ranks give up saving, and after which they are killed. The
rest is left for requeueing."""

_START_SECONDS = 900  # all ranks may import torch from a cold network disk
_CHECK_SECONDS = 300  # for the check itself, once all ranks have started
_CHECK_WAIT_SECONDS = 60  # for the other ranks, once the first has left the check
_TRAIN_WAIT_SECONDS = 40  # the same for training, at whose normal end ranks leave together
_POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One job of a recipe.

    Attributes:
        stage: Stage to train; None for all that are not complete.
    """

    train: tuple[str, ...]
    folder: Path
    stage: str | None
    save_seconds: int
    check: NodeCheck | None

    @property
    def name(self) -> str:
        """Name of the job's files in the recipe's folder."""
        return self.stage or "job"


def run_job(job: Job, scheduler: Scheduler, environment: Mapping[str, str] = os.environ) -> int:
    """Run one start of a job and return the exit code of its batch step.

    Raises `UserError` outside a job, and for a wrong setting of the site.
    """
    allocation, site = scheduler.allocation(environment), Site.of(environment)
    restarts = read_restarts(job.folder, job.name)
    newest = newest_checkpoints(job.folder, job.stage)
    restarts.begin(newest, is_restart=allocation.restarts > 0)
    write_restarts(job.folder, job.name, restarts)
    _say(f"job {allocation.job}, start {allocation.restarts + 1}, on {', '.join(allocation.nodes)}")
    if restarts.fruitless >= FRUITLESS_STARTS:  # SLURM requeues after node failures, too
        return _stop_restarting()
    with _Steps(job, allocation, scheduler) as steps:
        return _Start(job, allocation, site, scheduler, steps, restarts).run()


def final_code(code: int, exits: Sequence[RankExit]) -> int | None:
    """Return the exit code of a job whose step ended with `code`; None to start it again.

    One rank with a final code decides, whatever ended the others. A user's mistake that only
    `lone_node` reports does not count: the node is to blame.
    """
    if code == EXIT_OK:
        return EXIT_OK
    codes = {code, *(each.code for each in exits)}
    if lone_node(exits):
        codes.discard(EXIT_USER_ERROR)
    return next((final for final in FINAL_EXIT_CODES if final in codes), None)


def lone_node(exits: Sequence[RankExit]) -> str:
    """Return the only node whose ranks report a mistake, such as missing data; empty if none.

    All ranks have the same config, so rank 0, or two nodes, report a mistake in the config.
    """
    mistaken = [each for each in exits if each.code == EXIT_USER_ERROR]
    nodes = {each.node for each in mistaken}
    return "" if len(nodes) != 1 or mistaken[0].rank == 0 else nodes.pop()


@dataclass(frozen=True, slots=True)
class _Start:
    """One start of a job; its methods return the exit code of the batch step, None to go on."""

    job: Job
    allocation: Allocation
    site: Site
    scheduler: Scheduler
    steps: "_Steps"
    restarts: Restarts

    def run(self) -> int:
        code = None if self.job.check is None else self._check(self.job.check)
        if code is None and not self.steps.warned:
            code = self._train()
        return self._start_again(()) if code is None else code

    def _train(self) -> int | None:
        job, allocation = self.job, self.allocation
        stage = [] if job.stage is None else ["--stage", job.stage]
        command = ["train", *job.train, *stage, "--dump-folder", str(job.folder)]
        variables = allocation.rank_environment(self.site, port=allocation.port())
        variables[GRACE_VARIABLE] = str(RANKS_SHARE * job.save_seconds)
        reports = records_folder(job.folder) / f"exit-{allocation.job}-{allocation.restarts}"
        variables[REPORTS_VARIABLE] = str(reports)
        code = self._step(command, variables, wait=_TRAIN_WAIT_SECONDS)
        exits = read_exits(reports)
        if len(allocation.nodes) == 1:  # there is no other node to go to
            exits = [each._replace(node="") for each in exits]
        if code != EXIT_OK:
            _say(f"the ranks ended with code {code}; {describe_exits(exits, allocation.ranks)}")
        if (final := final_code(code, exits)) is not None:
            _say("finished" if final == EXIT_OK else f"failed with code {final}: not started again")
            return final
        if lone := lone_node(exits):
            reason = f"its ranks alone ended with code {EXIT_USER_ERROR}, a mistake"
            _say(f"bad node {lone}: {reason}")
            return self._start_without({lone: reason})
        return None

    def _check(self, check: NodeCheck) -> int | None:
        allocation, folder = self.allocation, self.job.folder
        reports = records_folder(folder) / f"check-{allocation.job}-{allocation.restarts}"
        arguments = check.command(reports, allocation, folder)
        self._step(
            arguments,
            allocation.rank_environment(self.site, port=allocation.port(1)),
            wait=_CHECK_WAIT_SECONDS,
            limit=_CHECK_SECONDS,
            started=lambda: sum(1 for _ in reports.glob("rank-*.json")) == allocation.ranks,
        )
        if self.steps.warned:
            return None  # the time limit came first; nothing is known about the nodes
        bad, others = bad_nodes(reports, allocation)
        for node, reason in bad.items():
            _say(f"bad node {node}: {reason}")
        for reason in others:
            _say(f"node check: {reason}")
        if not bad and not others:
            return None
        if not bad or len(bad) == len(allocation.nodes):
            _say("no single node is to blame: not started again")
            return EXIT_CRASH
        return self._start_without(bad)

    def _step(
        self, command: Sequence[str], variables: Mapping[str, str], *, wait: int, **limits: Any
    ) -> int:
        step = self.scheduler.step(self.allocation, self.site, command, wait=wait)
        return self.steps.run(step, variables, **limits)

    def _start_without(self, bad: Mapping[str, str]) -> int:
        self.restarts.bad_nodes.update(bad)
        write_restarts(self.job.folder, self.job.name, self.restarts)
        return self._start_again(tuple(bad))

    def _start_again(self, exclude: Sequence[str]) -> int:
        job, number = self.job, self.allocation.job
        if (state := self.scheduler.state(number).state) != RUNNING:
            _say(f"the job is {state.lower()}: not started again")
            return EXIT_STOPPED
        now = newest_checkpoints(job.folder, job.stage)
        fruitless = not is_newer(now, self.restarts.checkpoints)
        if fruitless and self.restarts.fruitless + 1 >= FRUITLESS_STARTS:
            return _stop_restarting()
        # SLURM sends SIGTERM as soon as it has requeued the job, but this process must still tell
        # it to exclude bad nodes.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _say(self.scheduler.start_again(number, exclude=exclude))
        return EXIT_STOPPED


def _stop_restarting() -> int:
    starts = f"{FRUITLESS_STARTS} starts without a new checkpoint: not started again"
    _say(f"{starts}; find the reason, then submit the job again")
    return EXIT_CRASH


class _Steps:
    """Runs steps one after another and passes SLURM's warning on to the running one."""

    def __init__(self, job: Job, allocation: Allocation, scheduler: Scheduler) -> None:
        self._limit = STEP_SHARE * job.save_seconds
        self._job, self._scheduler = allocation.job, scheduler
        self._step: subprocess.Popen[bytes] | None = None
        self._killer: threading.Timer | None = None
        self.warned = False

    def __enter__(self) -> "_Steps":
        signal.signal(signal.SIGUSR1, self._warn)
        # SIGTERM means cancelled: SLURM signals the ranks, too, and this process waits for them.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._killer is not None:
            self._killer.cancel()

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        limit: float | None = None,
        started: Callable[[], bool] = lambda: True,
    ) -> int:
        """Run one step and return its exit code as a shell gives it.

        With a `limit`, kill the step if `started` is not true within `_START_SECONDS`, or if it
        runs for more than `limit` seconds after that.
        """
        with subprocess.Popen(command, env=dict(environment)) as step:
            self._step = step
            if self.warned:
                step.send_signal(signal.SIGUSR1)
            deadline = time.monotonic() + _START_SECONDS
            while limit is not None and step.poll() is None and time.monotonic() < deadline:
                if started():
                    break
                time.sleep(_POLL_SECONDS)
            try:
                code = step.wait(limit if limit is None or started() else 0)
            except subprocess.TimeoutExpired:
                self._kill()
                code = step.wait()
            self._step = None
        return 128 - code if code < 0 else code

    def _warn(self, number: int, frame: FrameType | None) -> None:
        if self._step is not None:
            self._step.send_signal(signal.SIGUSR1)
        if not self.warned:
            _say("told to end: the ranks save now")
            self.warned = True
            self._killer = threading.Timer(self._limit, self._kill)
            self._killer.daemon = True
            self._killer.start()

    def _kill(self) -> None:
        step = self._step
        if step is None:
            return
        _say("the ranks did not end in time: they are killed")
        try:
            self._scheduler.end_steps(self._job)
        except SchedulerError as error:
            _say(str(error))
        try:
            step.wait(self._limit / 10)
        except subprocess.TimeoutExpired:
            step.kill()


def _say(text: str) -> None:
    print(f"titan-loop slurm: {text}", file=sys.stderr, flush=True)
