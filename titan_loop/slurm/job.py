"""A training job: it checks its nodes, trains, and has SLURM start it again.

    SIGUSR1 from SLURM ─► srun ─► ranks save and exit with code 75; late ones are killed
    code 0 ─► the next stage's job begins
    code 2, 3, 4 or 130 (mistake, non-finite, unstable, interrupt) of a rank ─► the chain ends
    code 2 on one node only, and not on rank 0 ─► that node is bad
    any other code, or a bad node ─► requeued, until three starts in a row save no new checkpoint

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

from titan_loop.errors import EXIT_CRASH, EXIT_OK, EXIT_STOPPED, EXIT_USER_ERROR
from titan_loop.runs.exit_reports import REPORTS_VARIABLE, describe_exits, read_exits
from titan_loop.slurm.allocation import Allocation
from titan_loop.slurm.commands import SUCCESSOR_VARIABLE, CommandFailedError, show
from titan_loop.slurm.health import NodeCheck, bad_nodes
from titan_loop.slurm.record import (
    Restarts,
    is_newer,
    newest_checkpoints,
    read_restarts,
    slurm_folder,
    write_restarts,
)
from titan_loop.slurm.requeue import end_steps, final_code, lone_node, start_again
from titan_loop.slurm.site import Site
from titan_loop.training.stop_request import GRACE_VARIABLE

FRUITLESS_STARTS = 3
RANKS_SHARE, STEP_SHARE = 0.8, 0.9
"""Shares of `save_seconds` after which ranks give up saving, and after which they are killed. The
rest is left for requeueing."""

_START_SECONDS = 900  # all ranks may import torch from a cold network disk
_CHECK_SECONDS = 300  # for the check itself, once all ranks have started
_CHECK_WAIT_SECONDS = 60  # for the other ranks, once the first has left the check
_POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One job of a recipe.

    Attributes:
        stage: Stage to train; None for all that are not complete.
        save_seconds: Seconds between SLURM's SIGUSR1 and the time limit.
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


def run_job(job: Job, environment: Mapping[str, str] = os.environ) -> int:
    """Run one start of a job and return the exit code of its batch step.

    Raises `UserError` outside a job, and for a wrong setting of the site.
    """
    allocation, site = Allocation.current(environment), Site.of(environment)
    restarts = read_restarts(job.folder, job.name)
    is_restart = allocation.restarts > 0 or SUCCESSOR_VARIABLE in environment
    restarts.begin(newest_checkpoints(job.folder, job.stage), is_restart=is_restart)
    write_restarts(job.folder, job.name, restarts)
    _say(f"job {allocation.job}, start {allocation.restarts + 1}, on {', '.join(allocation.nodes)}")
    if restarts.fruitless >= FRUITLESS_STARTS:  # SLURM requeues after node failures, too
        return _stop_restarting()
    with _Steps(job, allocation) as steps:
        return _Start(job, allocation, site, steps, restarts).run()


@dataclass(frozen=True, slots=True)
class _Start:
    """One start of a job; its methods return the exit code of the batch step, None to go on."""

    job: Job
    allocation: Allocation
    site: Site
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
        reports = slurm_folder(job.folder) / f"exit-{allocation.job}-{allocation.restarts}"
        variables[REPORTS_VARIABLE] = str(reports)
        code = self.steps.run(allocation.srun(self.site, *command), variables)
        exits = read_exits(reports)
        if len(allocation.nodes) == 1:  # there is no other node to go to
            exits = [each._replace(node="") for each in exits]
        if code != EXIT_OK:
            _say(f"srun ended with code {code}; {describe_exits(exits, allocation.ranks)}")
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
        reports = slurm_folder(folder) / f"check-{allocation.job}-{allocation.restarts}"
        arguments = check.command(reports, allocation, folder)
        self.steps.run(
            allocation.srun(self.site, *arguments, wait=_CHECK_WAIT_SECONDS),
            allocation.rank_environment(self.site, port=allocation.port(1)),
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

    def _start_without(self, bad: Mapping[str, str]) -> int:
        self.restarts.bad_nodes.update(bad)
        write_restarts(self.job.folder, self.job.name, self.restarts)
        return self._start_again(tuple(bad))

    def _start_again(self, exclude: Sequence[str]) -> int:
        job, number = self.job, self.allocation.job
        if (state := show("job", number)["JobState"]) != "RUNNING":
            _say(f"the job is {state.lower()}: not started again")
            return EXIT_STOPPED
        now = newest_checkpoints(job.folder, job.stage)
        fruitless = not is_newer(now, self.restarts.checkpoints)
        if fruitless and self.restarts.fruitless + 1 >= FRUITLESS_STARTS:
            return _stop_restarting()
        # SLURM sends SIGTERM as soon as it has requeued the job, but this process must still tell
        # it to exclude bad nodes.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        again = {"folder": job.folder, "name": job.name, "save_seconds": job.save_seconds}
        _say(start_again(number, exclude=exclude, **again))
        return EXIT_STOPPED


def _stop_restarting() -> int:
    starts = f"{FRUITLESS_STARTS} starts without a new checkpoint: not started again"
    _say(f"{starts}; find the reason, then submit the job again")
    return EXIT_CRASH


class _Steps:
    """Runs steps one after another and passes SLURM's warning on to the running one."""

    def __init__(self, job: Job, allocation: Allocation) -> None:
        self._limit = STEP_SHARE * job.save_seconds
        self._job = allocation.job
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
            end_steps(self._job)
        except CommandFailedError as error:
            _say(str(error))
        try:
            step.wait(self._limit / 10)
        except subprocess.TimeoutExpired:
            step.kill()


def _say(text: str) -> None:
    print(f"titan-loop slurm: {text}", file=sys.stderr, flush=True)
