"""Batch scripts: directives, the site file, and one command; all logic is the command's."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_loop.slurm.site import Site


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What every job of a chain asks for.

    Attributes:
        nodes: How many.
        ranks_per_node: Processes a node, one a GPU.
        gpus_per_node: 0 on a CPU cluster.
        time: As `sbatch --time` takes it.
        save_seconds: How long before the time limit the ranks are told to save.
    """

    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    time: str
    save_seconds: int


def render_script(
    name: str,
    command: Sequence[str],
    *,
    resources: Resources,
    site: Site,
    site_file: Path | None,
    log: Path,
    more: Sequence[str] = (),
) -> str:
    """Return a batch script.

    Args:
        name: The job's.
        command: What follows `titan-loop`.
        resources: What the job asks for.
        site: Where partition and account come from.
        site_file: Sourced by the job; None for none.
        log: Appended to by every start of the job.
        more: Further directives.
    """
    directives = [
        f"--job-name={name}",
        f"--nodes={resources.nodes}",
        f"--ntasks-per-node={resources.ranks_per_node}",
        *([f"--gpus-per-node={resources.gpus_per_node}"] if resources.gpus_per_node else []),
        f"--time={resources.time}",
        *([f"--partition={shlex.quote(site.partition)}"] if site.partition else []),
        *([f"--account={shlex.quote(site.account)}"] if site.account else []),
        f"--output={shlex.quote(str(log))}",
        "--open-mode=append",
        *more,
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {directive}" for directive in directives),
            "",
            *([f"source {shlex.quote(str(site_file))}"] if site_file else []),
            f"exec {shlex.join([sys.executable, '-m', 'titan_loop', *command])}",
            "",
        ]
    )


def stage_directives(resources: Resources) -> list[str]:
    """Return what only a training job has: the warning before its end, and being requeued."""
    return [
        # To the batch step alone, which passes it on: without B: it would not know of it.
        f"--signal=B:USR1@{resources.save_seconds}",
        "--requeue",
        "--kill-on-invalid-dep=yes",
    ]
