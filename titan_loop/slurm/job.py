"""A training job: it checks its nodes, trains, and has itself started again.

    SIGUSR1 from SLURM ─► srun ─► ranks save and exit with REQUEUE_EXIT_CODE
        they do not end in time ─► they are killed
    0 ─► the next stage's job begins
    a rank's 2, 3, 4 or 130 (mistake, non-finite, unstable, interrupt) ─► failed, and the chain ends
    2 on one node without rank 0 ─► that node is bad
    any other code, or a bad node ─► requeued, until three starts in a row leave no new checkpoint

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

from titan_loop.errors import EXIT_CRASH, EXIT_OK, EXIT_USER_ERROR
from titan_loop.runs.exit_reports import REPORTS_VARIABLE, describe_exits, read_exits
from titan_loop.slurm.allocation import Allocation
from titan_loop.slurm.commands import CommandFailedError, show
from titan_loop.slurm.health import NodeCheck, bad_nodes
from titan_loop.slurm.record import (
    Restarts,
    is_newer,
    newest_checkpoints,
    read_restarts,
    slurm_folder,
    write_restarts,
)
from titan_loop.slurm.requeue import (
    REQUEUE_EXIT_CODE,
    SUCCESSOR_VARIABLE,
    end_steps,
    final_code,
    lone_node,
    start_again,
)
from titan_loop.slurm.site import Site
from titan_loop.training.stop_request import GRACE_VARIABLE

FRUITLESS_STARTS = 3
RANKS_SHARE, STEP_SHARE = 0.8, 0.9
"""Shares of `save_seconds` after which ranks give up, and after which they are killed. The rest is
left for requeueing."""

_START_SECONDS = 900
"""Time in which all ranks of the node check must have imported torch, from a cold network disk."""

_CHECK_SECONDS = 300
"""Time for the check once they have."""

_POLL_SECONDS = 1.0
_CHECK_WAIT_SECONDS = 60
"""Time from the first rank's end, good or bad, to the end of the check."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One job of a recipe.

    Attributes:
        stage: The stage to train; None for all that are not complete.
        save_seconds: Seconds between SLURM's SIGUSR1 and the time limit.
    """

    train: tuple[str, ...]
    folder: Path
    stage: str | None
    save_seconds: int
    check: NodeCheck | None

    @property
    def name(self) -> str:
        """Name of the job's files."""
        return self.stage or "job"


def run_job(job: Job, environment: Mapping[str, str] = os.environ) -> int:
    """Run one start of a job and return the exit code of its batch step.

    Raises:
        UserError: The process runs in no job, or a setting of the site is wrong.
    """
    allocation, site = Allocation.current(environment), Site.of(environment)
    restarts = read_restarts(job.folder, job.name)
    is_restart = allocation.restarts > 0 or SUCCESSOR_VARIABLE in environment
    restarts.begin(newest_checkpoints(job.folder, job.stage), is_restart=is_restart)
    write_restarts(job.folder, job.name, restarts)
    _say(f"job {allocation.job}, start {allocation.restarts + 1}, on {', '.join(allocation.nodes)}")
    if restarts.fruitless >= FRUITLESS_STARTS:  # SLURM's own requeues come here unasked
        return _stop_restarting()
    with _Steps(job, allocation) as steps:
        if job.check is not None:
            code = _check(job, job.check, allocation, site, steps, restarts)
            if code != EXIT_OK:
                return code
        if not steps.warned:
            code, bad = _train(job, allocation, site, steps)
            if code is not None:
                return code
            if bad:
                return _start_without(bad, job, allocation, restarts)
        return _start_again(job, allocation, restarts, ())


def _train(
    job: Job, allocation: Allocation, site: Site, steps: "_Steps"
) -> tuple[int | None, dict[str, str]]:
    stage = [] if job.stage is None else ["--stage", job.stage]
    command = ["train", *job.train, *stage, "--dump-folder", str(job.folder)]
    variables = allocation.rank_environment(site, port=allocation.port())
    variables[GRACE_VARIABLE] = str(RANKS_SHARE * job.save_seconds)
    reports = slurm_folder(job.folder) / f"exit-{allocation.job}-{allocation.restarts}"
    variables[REPORTS_VARIABLE] = str(reports)
    code = steps.run(allocation.srun(site, *command), variables)
    exits = read_exits(reports)
    if len(allocation.nodes) == 1:  # there is no other node to go to
        exits = [each._replace(node="") for each in exits]
    final = final_code(code, exits)
    if code != EXIT_OK:
        ranks = len(allocation.nodes) * allocation.ranks_per_node
        _say(f"srun ended with code {code}; {describe_exits(exits, ranks)}")
    if final is not None:
        _say("finished" if final == EXIT_OK else f"failed with code {final}: not started again")
    lone = "" if final is not None else lone_node(exits)
    if not lone:
        return final, {}
    reason = f"its ranks alone ended with code {EXIT_USER_ERROR}, a mistake"
    _say(f"bad node {lone}: {reason}")
    return None, {lone: reason}


def _check(
    job: Job,
    check: NodeCheck,
    allocation: Allocation,
    site: Site,
    steps: "_Steps",
    restarts: Restarts,
) -> int:
    """Check the nodes; return `EXIT_OK` if all are good, otherwise the job's exit code."""
    reports = slurm_folder(job.folder) / f"check-{allocation.job}-{allocation.restarts}"
    arguments = check.command(reports, allocation, job.folder)
    command = allocation.srun(site, *arguments, wait=_CHECK_WAIT_SECONDS)
    variables = allocation.rank_environment(site, port=allocation.port(1))
    ranks = len(allocation.nodes) * allocation.ranks_per_node
    steps.run(
        command,
        variables,
        limit=_CHECK_SECONDS,
        started=lambda: sum(1 for _ in reports.glob("rank-*.json")) == ranks,
    )
    if steps.warned:
        return EXIT_OK  # the time limit came first; nothing is known about the nodes
    bad, others = bad_nodes(reports, allocation)
    for node, reason in bad.items():
        _say(f"bad node {node}: {reason}")
    for reason in others:
        _say(f"node check: {reason}")
    if not bad and not others:
        return EXIT_OK
    if not bad or len(bad) == len(allocation.nodes):
        _say("no single node is to blame: not started again")
        return EXIT_CRASH
    return _start_without(bad, job, allocation, restarts)


def _start_without(
    bad: Mapping[str, str], job: Job, allocation: Allocation, restarts: Restarts
) -> int:
    restarts.bad_nodes.update(bad)
    write_restarts(job.folder, job.name, restarts)
    return _start_again(job, allocation, restarts, tuple(bad))


def _start_again(
    job: Job, allocation: Allocation, restarts: Restarts, exclude: Sequence[str]
) -> int:
    """Have the job started again, unless it was cancelled or makes no progress."""
    state = show("job", allocation.job)["JobState"]
    if state != "RUNNING":
        _say(f"the job is {state.lower()}: not started again")
        return REQUEUE_EXIT_CODE
    now = newest_checkpoints(job.folder, job.stage)
    if restarts.fruitless + 1 >= FRUITLESS_STARTS and not is_newer(now, restarts.checkpoints):
        return _stop_restarting()
    # SLURM ends this process with SIGTERM as soon as it has requeued the job, commands included.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _say(start_again(allocation.job, exclude=exclude, folder=job.folder, name=job.name))
    return REQUEUE_EXIT_CODE


def _stop_restarting() -> int:
    _say(
        f"{FRUITLESS_STARTS} starts without a new checkpoint: not started again; find the "
        "reason, then submit the job again"
    )
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
        # SIGTERM cancels the job: SLURM tells the ranks, too, and this process waits for them.
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

        Args:
            limit: Seconds after which it is killed, from when it has started; None for no limit.
            started: Whether it has started; if it does not in `_START_SECONDS`, it is killed.
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
