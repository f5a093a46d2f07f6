"""The job that this process runs in, as SLURM's variables describe it, and its `srun` commands."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from titan_loop.errors import UserError
from titan_loop.launcher import slurm_job
from titan_loop.slurm.commands import host_names
from titan_loop.slurm.site import Site

WAIT_SECONDS = 40
"""Time from the end of a step's first task until the others are killed: they may be waiting for a
rank that died. At a regular end ranks wait for each other and leave together."""

_FIRST_PORT, _PORTS, PORTS_A_JOB = 20_000, 12_000, 50  # below Linux's ephemeral ports


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """A job's nodes, the first one with the batch step, its tasks, and SLURM's restarts of it."""

    job: str
    restarts: int
    nodes: tuple[str, ...]
    ranks_per_node: int
    gpus_per_node: int

    @classmethod
    def current(cls, environment: Mapping[str, str] = os.environ) -> "Allocation":
        """Return the job that this process runs in; `UserError` if there is none."""
        job = slurm_job(environment)
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
        # TYPE:COUNT; with --gres there is only the count on the batch step's node.
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
        """Number of ranks in all."""
        return len(self.nodes) * self.ranks_per_node

    def port(self, offset: int = 0) -> int:
        """Return a port that differs from other jobs' ports and from the job's last start."""
        block = int(self.job) * 7 + self.restarts
        return _FIRST_PORT + (block * PORTS_A_JOB) % _PORTS + offset

    def srun(self, site: Site, *command: str, wait: int = WAIT_SECONDS) -> list[str]:
        """Return the command that starts `titan-loop` on every rank; `wait` as `WAIT_SECONDS`."""
        here = [sys.executable, "-m", "titan_loop"]
        program = [*site.container, "titan-loop"] if site.container else here
        ranks = f"--ntasks={self.ranks}", f"--ntasks-per-node={self.ranks_per_node}"
        # A rank that exits with code 75 must not have the others killed while they exit.
        end = "--kill-on-bad-exit=0", f"--wait={wait}"
        flags = f"--nodes={len(self.nodes)}", *ranks, *end, *site.srun_flags
        return ["srun", *flags, *program, *command]

    def rank_environment(
        self, site: Site, *, port: int, environment: Mapping[str, str] = os.environ
    ) -> dict[str, str]:
        """Return the environment of a step: the address where ranks meet, and the network."""
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
