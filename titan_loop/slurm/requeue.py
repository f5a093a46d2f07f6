"""Starts a job again: which exit codes ask for it, and how it is done.

ranks saved, hung, crashed or were killed ─► scontrol requeue: the same job, log and place in the
chain
refused ─► sbatch the same script, after this job ─► dependents wait for the successor
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from titan_loop.errors import (
    EXIT_INTERRUPTED,
    EXIT_NON_FINITE,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_UNSTABLE,
    EXIT_USER_ERROR,
)
from titan_loop.runs.exit_reports import RankExit
from titan_loop.slurm.commands import CommandFailedError, outside_of_a_job, show, slurm
from titan_loop.slurm.record import replace_job, slurm_folder

SUCCESSOR_VARIABLE = "TITAN_LOOP_SUCCESSOR_OF"
"""The job that a successor continues."""

REQUEUE_EXIT_CODE = EXIT_STOPPED
"""Exit code of ranks that stopped at a signal or were ended by the watchdog: 75. The exit codes of
all commands are in `titan_loop/errors.py`."""

FINAL_EXIT_CODES = (EXIT_USER_ERROR, EXIT_NON_FINITE, EXIT_UNSTABLE, EXIT_INTERRUPTED)
"""Exit codes of failures that another start would repeat, and of an interrupt."""

_UPDATE_ATTEMPTS = 5


def final_code(code: int, exits: Sequence[RankExit]) -> int | None:
    """Return the exit code of a job whose ranks ended, or None if it is to be started again.

    One rank's wrong loss decides, whatever ended its peers; so does a mistake that
    is not `lone_node`'s.

    Args:
        code: Exit code of the step, as a shell gives it: the highest of the ranks' codes.
    """
    if code == EXIT_OK:
        return EXIT_OK
    codes = {code, *(each.code for each in exits)}
    if lone_node(exits):
        codes.discard(EXIT_USER_ERROR)
    return next((final for final in FINAL_EXIT_CODES if final in codes), None)


def lone_node(exits: Sequence[RankExit]) -> str:
    """Return the node that alone calls the start a mistake, as one without the data; empty if none.

    All ranks have the same config: a mistake in it is one for rank 0, or for two nodes.
    """
    mistaken = [each for each in exits if each.code == EXIT_USER_ERROR]
    nodes = {each.node for each in mistaken}
    return "" if len(nodes) != 1 or mistaken[0].rank == 0 else nodes.pop()


def start_again(job: str, *, exclude: Sequence[str], folder: Path, name: str) -> str:
    """Have SLURM start this batch step's job again.

    Returns:
        A line for the log about the restart.

    Raises:
        CommandFailedError: SLURM accepted neither a requeue nor a successor.
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
    # Only a pending job can be changed so; this process lives until KillWait has passed.
    if excluded:
        _exclude(job, excluded)
    return f"job {job} requeued" + (f" without {excluded}" if excluded else "")


def _with_those_before(job: dict[str, str], exclude: Sequence[str]) -> str:
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
    """Submit the script of `job` again with its own flags, to run after it."""
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
    }  # the script repeats its own directives
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
    """Kill the tasks of a job's steps, but not its batch step."""
    for line in slurm("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i").split():
        if line.rpartition(".")[2].isdigit():
            try:
                slurm("scancel", "--signal=KILL", line)
            except CommandFailedError:
                continue  # it has just ended
