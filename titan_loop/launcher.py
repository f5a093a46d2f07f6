"""SLURM's variables of this process: its job, and its task where srun started it."""

import os
from collections.abc import Mapping
from typing import NamedTuple


class SlurmTask(NamedTuple):
    """A task of a SLURM step, which is one rank; `node` is empty if it is not known."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: str


def slurm_job(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the number of the job that this process runs in, if it runs in one."""
    return environment.get("SLURM_JOB_ID")


def slurm_task(environment: Mapping[str, str] = os.environ) -> SlurmTask | None:
    """Return the task that this process is; None outside of SLURM, and in an salloc shell."""
    if "SLURM_PROCID" not in environment:
        return None
    here = environment.get("SLURM_NTASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "1")
    return SlurmTask(
        rank=int(environment["SLURM_PROCID"]),
        world_size=int(environment.get("SLURM_NTASKS", "1")),
        local_rank=int(environment.get("SLURM_LOCALID", "0")),
        local_world_size=int(here.split("(")[0].split(",")[0]),  # such as 4(x2),3
        node=environment.get("SLURMD_NODENAME", ""),
    )


def is_in_step(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this is one of several tasks that srun started."""
    task = slurm_task(environment)  # a batch script and an salloc shell have one, too, but no step
    return "SLURM_STEP_ID" in environment and task is not None and task.world_size > 1
