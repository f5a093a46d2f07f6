"""The jobs of a recipe together: their states, and how to cancel them."""

from dataclasses import dataclass
from pathlib import Path

from titan_loop.slurm.commands import CommandFailedError, show, slurm
from titan_loop.slurm.record import read_jobs
from titan_loop.tables import columns

ACTIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED")


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One job of a chain; its `state` is SLURM's, or "GONE" once SLURM has forgotten it."""

    stage: str
    job: str
    state: str
    reason: str = ""
    restarts: str = ""
    elapsed: str = ""
    nodes: str = ""

    @property
    def active(self) -> bool:
        """Whether the job waits or runs."""
        return self.state in ACTIVE


def read_chain(folder: Path) -> list[JobStatus]:
    """Return the jobs submitted for a recipe's folder, of which there must be one, in order."""
    return [_status(stage, job) for stage, job in read_jobs(folder).items()]


def _status(stage: str, job: str) -> JobStatus:
    try:
        fields = show("job", job)
    except CommandFailedError:
        return JobStatus(stage, job, "GONE")
    reason, nodes = fields["Reason"], fields.get("NodeList", "")
    return JobStatus(
        stage,
        job,
        fields["JobState"],
        reason="" if reason == "None" else reason,
        restarts=fields.get("Restarts", "0"),
        elapsed=fields["RunTime"],
        nodes="" if nodes == "(null)" else nodes,
    )


def chain_lines(jobs: list[JobStatus]) -> list[str]:
    """Return the jobs as the lines of a table."""
    rows = [("stage", "job", "state", "restarts", "elapsed", "nodes", "reason")]
    rows += [(j.stage, j.job, j.state, j.restarts, j.elapsed, j.nodes, j.reason) for j in jobs]
    return columns(rows, left=range(len(rows[0])))


def cancel_chain(folder: Path) -> list[JobStatus]:
    """Cancel the jobs of a recipe's folder that wait or run, and return them."""
    active = [job for job in read_chain(folder) if job.active]
    # The last one first, so that no job begins because its parent has ended.
    for job in reversed(active):
        slurm("scancel", job.job)
    return active
