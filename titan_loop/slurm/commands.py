"""Runs SLURM's commands and returns their answers as Python values."""

import os
import re
import subprocess
import time
from collections.abc import Mapping

from titan_loop.errors import RunFailedError, UserError

_NAME = r"[A-Za-z][\w:/]*="
_FIELD = re.compile(rf"(?:^|\s)({_NAME[:-1]})=(.*?)(?=\s+{_NAME}|\s*$)")  # a value may have spaces
_SECONDS = 60.0
_WAITS = (5, 15, 40)
SUCCESSOR_VARIABLE = "TITAN_LOOP_SUCCESSOR_OF"  # the job that this one continues
UNKNOWN_JOB = "Invalid job id"  # in an answer about a job that SLURM has forgotten


class CommandFailedError(RunFailedError):
    """A SLURM command failed; the text is its error message."""


def slurm(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Run one of SLURM's commands, which must answer within a minute, and return its output."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, env=environment, check=False
        )
    except FileNotFoundError as error:
        raise UserError(
            f"{command[0]} is not on PATH; run this on a node of the cluster that has SLURM's "
            "commands (or add --dry-run)"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise CommandFailedError(f"{command[0]} did not answer within {_SECONDS:g} s") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"code {done.returncode}"
        raise CommandFailedError(f"{' '.join(command[:2])}: {said}")
    return done.stdout


def sbatch(*arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Submit a job and return its number; lines that a site's wrapper prints are passed over."""
    answer = slurm("sbatch", "--parsable", *arguments, environment=environment)
    numbers = re.findall(r"^\s*(\d+)(?:;\S+)?\s*$", answer, re.MULTILINE)
    if not numbers:
        raise RunFailedError(
            f"sbatch answered {' '.join(answer.split())!r}, and no line of it is a job's number; "
            "the job may be queued all the same: look with squeue, and call SLURM's own sbatch"
        )
    return numbers[-1]


def show(kind: str, name: str) -> dict[str, str]:
    """Return the fields that `scontrol show KIND NAME` prints.

    A controller that is out of reach is asked again for a minute.
    """
    waits = [*_WAITS]
    while True:
        try:
            said = slurm("scontrol", "show", "--oneliner", kind, name)
            return dict(_FIELD.findall(said.splitlines()[0]))
        except CommandFailedError as error:
            if UNKNOWN_JOB in str(error) or not waits:
                raise
            time.sleep(waits.pop(0))


def host_names(node_list: str) -> list[str]:
    """Return the nodes of a compressed list such as `n[1-4,7]`."""
    return slurm("scontrol", "show", "hostnames", node_list).split() if node_list else []


def outside_of_a_job(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment without this job's variables; `sbatch` would pass them to new jobs."""
    own = ("SLURM_", "SLURMD_", "SRUN_", SUCCESSOR_VARIABLE)
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(own) or name == "SLURM_CONF"
    }


def parse_seconds(time: str) -> int:
    """Convert a time of `sbatch --time` (M, M:S, H:M:S, D-H, D-H:M or D-H:M:S) to seconds."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        raise UserError(f"--time={time} is not a time limit; write H:M:S or D-H:M:S")
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is None and len(numbers) < 3:
        numbers = [0, *numbers]  # minutes come first
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return int(days or 0) * 86_400 + hours * 3_600 + minutes * 60 + seconds
