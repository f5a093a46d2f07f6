"""A training job: it checks its nodes, trains, and has itself started again.

    SIGUSR1 from SLURM ─► srun ─► ranks save and exit with REQUEUE_EXIT_CODE
        they do not end in time ─► they are killed
    REQUEUE_EXIT_CODE or a bad node ─► requeued, at most three times without a new checkpoint
    0 ─► the next stage's job begins        any other code ─► failed: the next stage never begins

The process replaces the shell of the batch step, so that `--signal=B:USR1@…` reaches it.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from titan_loop.errors import EXIT_CRASH, EXIT_OK
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
    start_again,
    wants_requeue,
)
from titan_loop.slurm.site import Site
from titan_loop.training.stop_request import GRACE_VARIABLE

FRUITLESS_RESTARTS = 3
RANKS_SHARE, STEP_SHARE = 0.8, 0.9
"""Shares of `save_seconds` after which ranks give up, and after which they are killed. The rest is
left for requeueing."""

_CHECK_SECONDS = 300
_CHECK_WAIT_SECONDS = 60
"""Time from the first rank's end, good or bad, to the end of the check."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One job of a recipe.

    Attributes:
        train: Arguments of `titan-loop train`, without folder and stage.
        folder: Folder of the recipe.
        stage: The stage to train; None for all that are not complete.
        save_seconds: Seconds between SLURM's SIGUSR1 and the time limit.
        check: Requirements on the nodes; None for no check.
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
    if restarts.fruitless > FRUITLESS_RESTARTS:  # SLURM's own requeues come here unasked
        return _stop_restarting()
    with _Steps(job, allocation) as steps:
        if job.check is not None:
            code = _check(job, job.check, allocation, site, steps, restarts)
            if code != EXIT_OK:
                return code
        code = REQUEUE_EXIT_CODE if steps.warned else steps.run(*_training(job, allocation, site))
        if code == EXIT_OK or not steps.may_start_again(code):
            _say("finished" if code == EXIT_OK else f"failed with code {code}: not started again")
            return code
        return _start_again(job, allocation, restarts, ())


def _training(job: Job, allocation: Allocation, site: Site) -> tuple[list[str], dict[str, str]]:
    stage = [] if job.stage is None else ["--stage", job.stage]
    command = ["train", *job.train, *stage, "--dump-folder", str(job.folder)]
    variables = allocation.rank_environment(site, port=allocation.port())
    variables[GRACE_VARIABLE] = str(RANKS_SHARE * job.save_seconds)
    return allocation.srun(site, *command), variables


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
    steps.run(command, variables, limit=_CHECK_SECONDS)
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
    if restarts.fruitless >= FRUITLESS_RESTARTS and not is_newer(now, restarts.checkpoints):
        return _stop_restarting()
    # SLURM ends this process with SIGTERM as soon as it has requeued the job, commands included.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _say(start_again(allocation.job, exclude=exclude, folder=job.folder, name=job.name))
    return REQUEUE_EXIT_CODE


def _stop_restarting() -> int:
    _say(
        f"{FRUITLESS_RESTARTS} restarts without a new checkpoint: not started again; find the "
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
        self._killed = False

    def __enter__(self) -> "_Steps":
        signal.signal(signal.SIGUSR1, self._warn)
        # SIGTERM cancels the job: SLURM tells the ranks, too, and this process waits for them.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._killer is not None:
            self._killer.cancel()

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], limit: float | None = None
    ) -> int:
        """Run one step, for `limit` seconds at most; return its exit code as a shell gives it."""
        self._killed = False
        with subprocess.Popen(command, env=dict(environment)) as step:
            self._step = step
            if self.warned:
                step.send_signal(signal.SIGUSR1)
            try:
                code = step.wait(limit)
            except subprocess.TimeoutExpired:
                self._kill()
                code = step.wait()
            self._step = None
        return 128 - code if code < 0 else code

    def may_start_again(self, code: int) -> bool:
        """Return whether a step that ended with `code` is to be started again."""
        return wants_requeue(code, warned=self.warned, killed=self._killed)

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
        self._killed = True
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
