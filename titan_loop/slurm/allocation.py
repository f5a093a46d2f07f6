"""The job this process runs in, as SLURM's variables describe it, and its `srun` commands."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from titan_loop.errors import UserError
from titan_loop.slurm.commands import host_names
from titan_loop.slurm.site import Site

WAIT_SECONDS = 120
"""After its first task has ended, a step's others are killed: a rank that died leaves the rest
waiting. Longer than ranks differ at a regular end."""

_FIRST_PORT, _PORTS, PORTS_A_JOB = 20_000, 12_000, 50
"""Below what Linux gives to outgoing connections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """A job's nodes and tasks.

    Attributes:
        job: Its number.
        restarts: How often SLURM has started it again.
        nodes: Names, the batch step's first.
        ranks_per_node: Tasks a node.
        gpus_per_node: What it asked for; 0 for none.
    """

    job: str
    restarts: int
    nodes: tuple[str, ...]
    ranks_per_node: int
    gpus_per_node: int

    @classmethod
    def current(cls, environment: Mapping[str, str] = os.environ) -> "Allocation":
        """Return the job this process runs in.

        Raises:
            UserError: It runs in none, or the job does not say how many tasks a node has.
        """
        if "SLURM_JOB_ID" not in environment:
            raise UserError(
                "slurm run is what a batch script calls: use titan-loop slurm submit, or sbatch "
                "slurm/pretrain.sbatch"
            )
        ranks = environment.get("SLURM_NTASKS_PER_NODE", "")
        if not ranks.isdigit():
            raise UserError(
                "the batch script does not say how many ranks a node has; give it "
                "--ntasks-per-node, one for each GPU"
            )
        gpus = environment.get("SLURM_GPUS_PER_NODE", "0").rpartition(":")[2]  # TYPE:COUNT
        return cls(
            job=environment["SLURM_JOB_ID"],
            restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
            nodes=tuple(host_names(environment["SLURM_JOB_NODELIST"])),
            ranks_per_node=int(ranks),
            gpus_per_node=int(gpus) if gpus.isdigit() else 0,
        )

    def port(self, offset: int = 0) -> int:
        """Return a port that jobs on the same node do not share, nor a job with its last start."""
        block = int(self.job) * 7 + self.restarts
        return _FIRST_PORT + (block * PORTS_A_JOB) % _PORTS + offset

    def srun(self, site: Site, *command: str, wait: int = WAIT_SECONDS) -> list[str]:
        """Return the command that starts `titan-loop` on every rank.

        Args:
            site: Flags and container.
            *command: What follows `titan-loop`.
            wait: Seconds from the end of the first rank to that of the others.
        """
        program = (
            [*site.container, "titan-loop"]
            if site.container
            else [sys.executable, "-m", "titan_loop"]
        )
        return [
            "srun",
            f"--nodes={len(self.nodes)}",
            f"--ntasks={len(self.nodes) * self.ranks_per_node}",
            f"--ntasks-per-node={self.ranks_per_node}",
            # A rank that leaves with code 75 must not have the others killed while they leave.
            "--kill-on-bad-exit=0",
            f"--wait={wait}",
            *site.srun_flags,
            *program,
            *command,
        ]

    def rank_environment(
        self, site: Site, *, port: int, environment: Mapping[str, str] = os.environ
    ) -> dict[str, str]:
        """Return the environment of a step: where ranks meet, and over which network."""
        variables = {
            **environment,
            "MASTER_ADDR": site.rendezvous_host or self.nodes[0],
            "MASTER_PORT": str(port),
        }
        if site.network_interface:
            variables["NCCL_SOCKET_IFNAME"] = site.network_interface
            variables["GLOO_SOCKET_IFNAME"] = site.network_interface
        if "SLURM_CPUS_PER_TASK" in environment:  # srun does not inherit it by itself
            variables["SRUN_CPUS_PER_TASK"] = environment["SLURM_CPUS_PER_TASK"]
        return variables
