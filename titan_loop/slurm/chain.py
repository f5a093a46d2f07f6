"""Reads the states of a recipe's jobs, and cancels them."""

from pathlib import Path
from typing import NamedTuple

from titan_loop.slurm.commands import UNKNOWN_JOB, CommandFailedError, show, slurm
from titan_loop.slurm.record import read_jobs
from titan_loop.tables import columns

GONE = "GONE"
_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT", GONE),
)
"""States of a job that neither waits nor runs; any other is one of a job that may start."""


class JobStatus(NamedTuple):
    """One job of a chain; its `state` is SLURM's, or "GONE" once SLURM has forgotten it."""

    stage: str
    job: str
    state: str
    restarts: str = ""
    elapsed: str = ""
    nodes: str = ""
    reason: str = ""

    @property
    def is_active(self) -> bool:
        """Whether the job waits or runs."""
        return self.state not in _ENDED


def read_chain(folder: Path) -> list[JobStatus]:
    """Return the jobs of a recipe's folder in submission order; `UserError` if there are none."""
    return [_status(stage, job) for stage, job in read_jobs(folder).items()]


def _status(stage: str, job: str) -> JobStatus:
    try:
        shown = show("job", job)
    except CommandFailedError as error:
        if UNKNOWN_JOB not in str(error):
            raise
        return JobStatus(stage, job, GONE)
    return JobStatus(
        stage,
        job,
        shown["JobState"],
        restarts=shown.get("Restarts", "0"),
        elapsed=shown["RunTime"],
        nodes=shown.get("NodeList", "").removeprefix("(null)"),
        reason="" if shown["Reason"] == "None" else shown["Reason"],
    )


def chain_lines(jobs: list[JobStatus]) -> list[str]:
    """Return the jobs as the lines of a table."""
    return columns([JobStatus._fields, *jobs], left=range(len(JobStatus._fields)))


def cancel_chain(folder: Path) -> list[JobStatus]:
    """Cancel and return the jobs of a recipe's folder that are waiting or running."""
    active = [job for job in read_chain(folder) if job.is_active]
    # Children first: a parent that completes meanwhile must not start one.
    for job in reversed(active):
        slurm("scancel", job.job)
    return active
