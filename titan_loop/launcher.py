"""This process by the launcher's variables: its job, and the rank that it is."""

import os
from collections.abc import Mapping
from typing import NamedTuple

NODE_VARIABLE = "TITAN_LOOP_NODE"  # of a rank that `launch.local` started, with torchrun's others


class Task(NamedTuple):
    """A rank of a job; `node` is empty if it is not known."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: str


def slurm_job(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the number of the SLURM job that this process runs in, if it runs in one."""
    return environment.get("SLURM_JOB_ID")


def current_task(environment: Mapping[str, str] = os.environ) -> Task | None:
    """Return the rank of a job that this process is; None outside, and in an salloc shell."""
    if NODE_VARIABLE in environment:
        return Task(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            local_world_size=int(environment["LOCAL_WORLD_SIZE"]),
            node=environment[NODE_VARIABLE],
        )
    if "SLURM_PROCID" not in environment:
        return None
    here = environment.get("SLURM_NTASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "1")
    return Task(
        rank=int(environment["SLURM_PROCID"]),
        world_size=int(environment.get("SLURM_NTASKS", "1")),
        local_rank=int(environment.get("SLURM_LOCALID", "0")),
        local_world_size=int(here.split("(")[0].split(",")[0]),  # such as 4(x2),3
        node=environment.get("SLURMD_NODENAME", ""),
    )


def is_in_step(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this is one of several tasks that srun started."""
    task = current_task(environment)  # a batch script and an salloc shell have one, but no step
    return "SLURM_STEP_ID" in environment and task is not None and task.world_size > 1
