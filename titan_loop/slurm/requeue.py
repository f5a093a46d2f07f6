"""Start a job again: requeue it, or submit a successor where the cluster refuses to.

scontrol requeue ─► same job, same log, same place in the chain
    refused ─► sbatch the same script, after this job ─► dependents wait for the successor
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from titan_loop.slurm.commands import CommandFailedError, outside_of_a_job, show, slurm
from titan_loop.slurm.record import replace_job, slurm_folder

SUCCESSOR_VARIABLE = "TITAN_LOOP_SUCCESSOR_OF"
"""The job that a successor goes on with."""

_UPDATE_ATTEMPTS = 5


def start_again(job: str, *, exclude: Sequence[str], folder: Path, name: str) -> str:
    """Have `job`, in whose batch step this runs, started again.

    Args:
        job: Its number.
        exclude: Nodes to keep away from.
        folder: The recipe's, whose record follows the work to a successor.
        name: Of the job's files there.

    Returns:
        What was done, for the log.

    Raises:
        CommandFailedError: Neither way was accepted.
    """
    before = show("job", job)
    excluded = _with_those_before(before, exclude)
    try:
        slurm("scontrol", "requeue", job)
    except CommandFailedError as refusal:
        successor = _submit_successor(job, before, excluded, slurm_folder(folder) / f"{name}.next")
        moved = _repoint_dependents(job, successor)
        replace_job(folder, job, successor)
        waiting = f"; {', '.join(moved)} wait for it now" if moved else ""
        return f"{refusal}; job {successor} goes on in its place{waiting}"
    # Only a job that is pending again takes it, and this process has until KillWait.
    if excluded:
        _exclude(job, excluded)
    return f"job {job} requeued" + (f" without {excluded}" if excluded else "")


def _with_those_before(job: dict[str, str], exclude: Sequence[str]) -> str:
    """Return the new list of excluded nodes; empty if there is nothing to add."""
    before = job.get("ExcNodeList", "(null)")
    return ",".join([*([] if before == "(null)" else [before]), *exclude]) if exclude else ""


def _exclude(job: str, nodes: str) -> None:
    for attempt in range(_UPDATE_ATTEMPTS):
        try:
            slurm("scontrol", "update", f"JobId={job}", f"ExcNodeList={nodes}")
            return
        except CommandFailedError:
            if attempt == _UPDATE_ATTEMPTS - 1:
                raise


def _submit_successor(job: str, fields: dict[str, str], exclude: str, script: Path) -> str:
    """Submit the script of `job` again, with what it was submitted with, to run after it."""
    slurm("scontrol", "write", "batch_script", job, str(script))
    flags = {
        "job-name": fields["JobName"],
        "nodes": fields["NumNodes"].partition("-")[0],
        "time": fields["TimeLimit"],
        "partition": fields["Partition"],
        "account": fields.get("Account", ""),
        "qos": fields.get("QOS", ""),
        "output": fields["StdOut"],
        "chdir": fields["WorkDir"],
        "exclude": exclude,
    }
    command = shlex.split(fields.get("Command", ""))
    answer = slurm(
        "sbatch",
        "--parsable",
        "--open-mode=append",
        f"--dependency=afterany:{job}",
        *(f"--{flag}={value}" for flag, value in flags.items() if value not in ("", "(null)")),
        str(script),
        *command[1:],
        environment={**outside_of_a_job(), SUCCESSOR_VARIABLE: job},
    )
    return answer.strip().partition(";")[0]


def _repoint_dependents(job: str, successor: str) -> list[str]:
    """Let jobs that wait for `job` wait for its successor; return their numbers."""
    moved: list[str] = []
    for line in slurm("squeue", "--noheader", "--format=%i|%E").splitlines():
        number, _, dependency = line.partition("|")
        wanted = re.sub(r"\([^)]*\)", "", dependency)  # "(unfulfilled)"
        changed = re.sub(rf"\b{job}\b", successor, wanted)
        if changed != wanted and number != successor:
            slurm("scontrol", "update", f"JobId={number}", f"Dependency={changed}")
            moved.append(number)
    return moved


def end_steps(job: str) -> None:
    """Kill the tasks of a job's steps, not its batch step."""
    for line in slurm("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i").split():
        if line.rpartition(".")[2].isdigit():
            try:
                slurm("scancel", "--signal=KILL", line)
            except CommandFailedError:
                continue  # it ended by itself
