"""Starts a job again, unless its exit codes say that another start would not help.

The same job is requeued and keeps its log and its place in the chain. Where SLURM refuses that, the
same script is submitted to run after this job, and dependents wait for that successor.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from titan_loop.errors import (
    EXIT_INTERRUPTED,
    EXIT_NON_FINITE,
    EXIT_OK,
    EXIT_UNSTABLE,
    EXIT_USER_ERROR,
)
from titan_loop.runs.exit_reports import RankExit
from titan_loop.slurm.commands import (
    SUCCESSOR_VARIABLE,
    CommandFailedError,
    outside_of_a_job,
    sbatch,
    show,
    slurm,
)
from titan_loop.slurm.record import replace_job, slurm_folder

FINAL_EXIT_CODES = (EXIT_USER_ERROR, EXIT_NON_FINITE, EXIT_UNSTABLE, EXIT_INTERRUPTED)
"""Exit codes of failures that another start would repeat, and of an interrupt."""

_UPDATE_ATTEMPTS = 5


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


def start_again(
    job: str, *, exclude: Sequence[str], folder: Path, name: str, save_seconds: int
) -> str:
    """Have SLURM start this batch step's job again, and return a line for the log.

    Raises `CommandFailedError` if SLURM accepts neither a requeue nor a successor.
    """
    before = show("job", job)
    earlier = before.get("ExcNodeList", "(null)")
    excluded = ",".join([*exclude] if earlier == "(null)" else [earlier, *exclude])
    try:
        slurm("scontrol", "requeue", job)
    except CommandFailedError as refusal:
        if show("job", job)["JobState"] == "RUNNING":  # else only the answer was lost
            script = slurm_folder(folder) / f"{name}.next"
            signal = f"B:USR1@{save_seconds}"  # the one flag that SLURM does not show
            flags = {**_flags(before), "exclude": excluded, "signal": signal}
            successor = _submit_successor(job, before, flags, script)
            moved = _repoint_dependents(job, successor)
            replace_job(folder, job, successor)
            waiting = f"; {', '.join(moved)} wait for it now" if moved else ""
            return f"{refusal}; job {successor} goes on in its place{waiting}"
    # Only a pending job can exclude nodes; this process lives until KillWait has passed.
    if exclude:
        _exclude(job, excluded)
    return f"job {job} requeued" + (f" without {excluded}" if exclude else "")


def _exclude(job: str, nodes: str) -> None:
    command = ("scontrol", "update", f"JobId={job}", f"ExcNodeList={nodes}")
    for _ in range(_UPDATE_ATTEMPTS - 1):
        with suppress(CommandFailedError):
            slurm(*command)
            return
    slurm(*command)


def _flags(fields: Mapping[str, str]) -> dict[str, str]:
    """Return the flags of sbatch that give a job's resources; its script may lack some of them."""
    gres = fields.get("TresPerNode", "").removeprefix("gres:").replace(":gres:", ",")
    return {
        "job-name": fields["JobName"],
        "nodes": fields["NumNodes"].partition("-")[0],
        "time": fields["TimeLimit"],
        "partition": fields["Partition"],
        "account": fields.get("Account", ""),
        "qos": fields.get("QOS", ""),
        "reservation": fields.get("Reservation", ""),
        "constraint": fields.get("Features", ""),
        "gres": gres,
        "mem": fields.get("MinMemoryNode", ""),
        "mem-per-cpu": fields.get("MinMemoryCPU", ""),
        "cpus-per-task": fields.get("CPUs/Task", ""),
        "ntasks-per-node": fields.get("NtasksPerN:B:S:C", "").partition(":")[0],
        "output": fields["StdOut"],
        "chdir": fields["WorkDir"],
    }


def _submit_successor(
    job: str, fields: Mapping[str, str], flags: Mapping[str, str], script: Path
) -> str:
    slurm("scontrol", "write", "batch_script", job, str(script))
    arguments = shlex.split(fields.get("Command", ""))[1:]
    kept = [f"--{flag}={value}" for flag, value in flags.items() if value not in ("", "(null)")]
    return sbatch(
        "--open-mode=append",
        f"--dependency=afterany:{job}",
        *kept,
        str(script),
        *arguments,
        environment={**outside_of_a_job(), SUCCESSOR_VARIABLE: job},
    )


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
            with suppress(CommandFailedError):  # it may just have ended
                slurm("scancel", "--signal=KILL", line)
