"""Protocol of a scheduler of jobs; everything else about jobs is the same for all of them.

`TITAN_LOOP_SCHEDULER` names one, SLURM without it: NAME is the class `SCHEDULER` of the module
`titan_loop.launch.NAME`, or MODULE:CLASS for one of your own.
"""

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from titan_loop.errors import RunFailedError, UserError
from titan_loop.launch.site import Site

SCHEDULER_VARIABLE = "TITAN_LOOP_SCHEDULER"
RUNNING = "RUNNING"
PORTS_A_JOB = 50
_FIRST_PORT, _PORTS = 20_000, 12_000  # these stay below Linux's ephemeral ports


class SchedulerError(RunFailedError):
    """A command of the scheduler failed; the text is its error message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """Resources that every job of a chain asks for; `slurm submit --help` explains them."""

    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    time: str
    save_seconds: int
    gpu_type: str = ""
    flags: tuple[str, ...] = ()


class JobStatus(NamedTuple):
    """One job; `state` is the scheduler's word, `RUNNING` while it runs."""

    job: str
    state: str
    is_active: bool = False
    restarts: str = ""
    elapsed: str = ""
    nodes: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """The nodes and ranks of a job; its batch step runs on the first node."""

    job: str
    restarts: int
    nodes: tuple[str, ...]
    ranks_per_node: int
    gpus_per_node: int

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return len(self.nodes) * self.ranks_per_node

    def port(self, offset: int = 0) -> int:
        """Return a port; neighbouring jobs, and a job's successive starts, get different ones."""
        block = sum(map(int, self.job.split("_"))) * 7 + self.restarts
        return _FIRST_PORT + (block * PORTS_A_JOB) % _PORTS + offset

    def rank_environment(
        self, site: Site, *, port: int, environment: Mapping[str, str] = os.environ
    ) -> dict[str, str]:
        """Return a step's environment, with the ranks' meeting address and network interface."""
        variables = {
            **environment,
            "MASTER_ADDR": site.rendezvous_host or self.nodes[0],
            "MASTER_PORT": str(port),
        }
        if site.network_interface:
            variables["NCCL_SOCKET_IFNAME"] = site.network_interface
            variables["GLOO_SOCKET_IFNAME"] = site.network_interface
        return variables


class Scheduler(Protocol):
    """Submits jobs, knows their states, and starts them again."""

    def script(
        self, name: str, command: Sequence[str], log: Path, resources: Resources, site: Site
    ) -> str:
        """Return the batch script that runs `command`; all of a job's starts append to `log`."""
        ...

    def submit(self, script: Path, *, after: str | None, environment: Mapping[str, str]) -> str:
        """Submit a job that waits for the success of another one; return its number."""
        ...

    def state(self, job: str) -> JobStatus:
        """Return the state of a job, also of one that ended or was forgotten."""
        ...

    def cancel(self, job: str) -> None:
        """Cancel a job; its ranks save first."""
        ...

    def allocation(self, environment: Mapping[str, str]) -> Allocation:
        """Return the job that this process is the batch step of; `UserError` if there is none."""
        ...

    def step(
        self, where: Allocation, site: Site, command: Sequence[str], *, wait: int
    ) -> list[str]:
        """Return the command that runs `titan-loop COMMAND` on every rank.

        It passes SIGUSR1 on, kills the others `wait` seconds after the first rank has ended, and
        ends with the highest exit code.
        """
        ...

    def end_steps(self, job: str) -> None:
        """Kill the ranks of a job, but not its batch step."""
        ...

    def start_again(self, job: str, *, exclude: Sequence[str]) -> str:
        """Start a running job anew once it ends, off some nodes; return a line for the log."""
        ...


def find_scheduler(environment: Mapping[str, str] = os.environ) -> Scheduler:
    """Return the scheduler that an environment names."""
    name = environment.get(SCHEDULER_VARIABLE, "slurm")
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module if attribute else f"{__package__}.{module}")
        return getattr(found, attribute or "SCHEDULER")()
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{SCHEDULER_VARIABLE}={name} is not a scheduler ({error}); use slurm, local or "
            "MODULE:CLASS"
        ) from error
