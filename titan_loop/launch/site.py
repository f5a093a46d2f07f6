"""The settings of a cluster: variables that the user's site file sets.

The file is a shell script, since loading modules and activating an environment must come before any
Python. Every job sources it; `submit` sources it, too, to know the jobs' environment.
`slurm/site.sh.example` explains the variables.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_loop.errors import UserError, nearest

DEFAULT_SITE = Path("slurm/site.sh")

_VARIABLES = {
    "TITAN_LOOP_CONTAINER",
    "TITAN_LOOP_PLUGINS",
    "TITAN_LOOP_SBATCH_FLAGS",
    "TITAN_LOOP_SCHEDULER",
    "TITAN_LOOP_SRUN_FLAGS",
    "TITAN_LOOP_NETWORK_INTERFACE",
    "TITAN_LOOP_RENDEZVOUS_HOST",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """The settings of one cluster; empty ones leave the choice to the scheduler, NCCL or gloo."""

    file: Path | None = None
    container: tuple[str, ...] = ()
    sbatch_flags: tuple[str, ...] = ()
    srun_flags: tuple[str, ...] = ()
    network_interface: str = ""
    rendezvous_host: str = ""
    partition: str = ""
    account: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str], file: Path | None = None) -> "Site":
        """Return the settings in an environment, inside a job or after `source_site`."""

        def words(name: str) -> tuple[str, ...]:
            return split_words(name, environment.get(name, ""))

        return cls(
            file=file,
            container=words("TITAN_LOOP_CONTAINER"),
            sbatch_flags=words("TITAN_LOOP_SBATCH_FLAGS"),
            srun_flags=words("TITAN_LOOP_SRUN_FLAGS"),
            network_interface=environment.get("TITAN_LOOP_NETWORK_INTERFACE", ""),
            rendezvous_host=environment.get("TITAN_LOOP_RENDEZVOUS_HOST", ""),
            partition=environment.get("SBATCH_PARTITION", ""),
            account=environment.get("SBATCH_ACCOUNT", ""),
        )

    @property
    def program(self) -> list[str]:
        """The words before a rank's arguments of `titan-loop`."""
        python = [sys.executable, "-m", "titan_loop"]
        return [*self.container, "titan-loop"] if self.container else python

    def batch_script(self, directives: Sequence[str], command: Sequence[str]) -> str:
        """Return a script that sources the site file and becomes `titan-loop COMMAND`."""
        lines = [
            "#!/bin/bash",
            *directives,
            "",
            *([f"source {shlex.quote(str(self.file))}"] if self.file else []),
            f"exec {shlex.join([sys.executable, '-m', 'titan_loop', *command])}",
        ]
        return "\n".join(lines) + "\n"


def split_words(name: str, text: str) -> tuple[str, ...]:
    """Return the words of a value as a shell reads them; raises `UserError` for an open quote."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"{name}={text!r}: {error}; fix the quotes") from error


def find_site(given: str | None) -> Path | None:
    """Return the given site file, which must be there, or else `slurm/site.sh` if it exists."""
    path = DEFAULT_SITE if given is None else Path(given)
    if path.is_file():
        return path.absolute()
    if given is not None:
        raise UserError(f"--site={given} is not a file; copy slurm/site.sh.example and fill it in")
    return None


def source_site(
    path: Path | None, environment: Mapping[str, str] = os.environ
) -> Mapping[str, str]:
    """Return a job's environment; `UserError` if sourcing its site file fails."""
    if path is None:
        return environment
    # `env -0` writes to its own file descriptor, since `module load` may print anything.
    program = 'set -e; exec 3>&1 >/dev/null; source "$0"; env -0 >&3'
    command = ["bash", "-c", program, str(path)]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        last = said[-1] if said else f"code {done.returncode}"
        raise UserError(f"site file {path} fails ({last}); fix it")
    entries = os.fsdecode(done.stdout).split("\0")
    sourced = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    for name in sourced.keys() - environment.keys() - _VARIABLES:
        if name.startswith("TITAN_LOOP_"):
            raise UserError(
                f"site file {path} sets {name}, which is not a setting{nearest(name, _VARIABLES)}"
            )
    return sourced
