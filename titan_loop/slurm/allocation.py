"""The current job, as SLURM's variables describe it, and its `srun` commands."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from titan_loop.errors import UserError
from titan_loop.launcher import slurm_job
from titan_loop.slurm.commands import host_names
from titan_loop.slurm.site import Site

WAIT_SECONDS = 40
"""Time until a step's tasks are killed once one of them has ended: they may be waiting for a rank
that died. When training ends normally, ranks wait for each other and leave together."""

PORTS_A_JOB = 50
_FIRST_PORT, _PORTS = 20_000, 12_000  # these stay below Linux's ephemeral ports


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """The nodes and ranks of a job; its batch step runs on the first node.

    Attributes:
        job: Number of the job, ARRAY_TASK for a task of an array.
    """

    job: str
    restarts: int
    nodes: tuple[str, ...]
    ranks_per_node: int
    gpus_per_node: int

    @classmethod
    def current(cls, environment: Mapping[str, str] = os.environ) -> "Allocation":
        """Return the job that this process runs in; `UserError` if there is none."""
        job = slurm_job(environment)
        if "SLURM_ARRAY_JOB_ID" in environment:  # the number of the last task is the whole array's
            job = f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
        if job is None:
            raise UserError(
                "slurm run is for batch scripts; use titan-loop slurm submit, or sbatch "
                "slurm/pretrain.sbatch"
            )
        ranks = environment.get("SLURM_NTASKS_PER_NODE", "")
        if not ranks.isdigit():
            raise UserError(
                "the batch script sets no number of ranks for a node; add --ntasks-per-node, one "
                "for each GPU"
            )
        # The first is COUNT or TYPE:COUNT; --gres sets only the second, for the batch step's node.
        gpus = environment.get("SLURM_GPUS_PER_NODE") or environment.get("SLURM_GPUS_ON_NODE", "0")
        gpus = gpus.rpartition(":")[2]
        return cls(
            job=job,
            restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
            nodes=tuple(host_names(environment["SLURM_JOB_NODELIST"])),
            ranks_per_node=int(ranks),
            gpus_per_node=int(gpus) if gpus.isdigit() else 0,
        )

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return len(self.nodes) * self.ranks_per_node

    def port(self, offset: int = 0) -> int:
        """Return a port; neighbouring jobs, and a job's successive starts, get different ones."""
        block = sum(map(int, self.job.split("_"))) * 7 + self.restarts
        return _FIRST_PORT + (block * PORTS_A_JOB) % _PORTS + offset

    def srun(self, site: Site, *command: str, wait: int = WAIT_SECONDS) -> list[str]:
        """Return the command that starts `titan-loop` on every rank; `wait` is its `--wait`."""
        program = [sys.executable, "-m", "titan_loop"]
        if site.container:
            program = [*site.container, "titan-loop"]
        return [
            "srun",
            f"--nodes={len(self.nodes)}",
            f"--ntasks={self.ranks}",
            f"--ntasks-per-node={self.ranks_per_node}",
            "--kill-on-bad-exit=0",  # while one rank exits with code 75, others may still save
            f"--wait={wait}",
            "--export=ALL",  # a job submitted with --export=NONE gives its steps no environment
            *site.srun_flags,
            *program,
            *command,
        ]

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
        if "SLURM_CPUS_PER_TASK" in environment:  # srun does not inherit it
            variables["SRUN_CPUS_PER_TASK"] = environment["SLURM_CPUS_PER_TASK"]
        return variables
