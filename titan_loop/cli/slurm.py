"""`titan-loop slurm VERB`: submit a recipe as a chain of jobs, show it, cancel it."""

import sys
from collections.abc import Sequence
from pathlib import Path

from titan_loop.cli.arguments import group
from titan_loop.cli.stage_flags import flags_of_stage, resolve_recipe
from titan_loop.errors import UserError, require_at_least
from titan_loop.launch import node_check
from titan_loop.launch.node_check import NodeCheck
from titan_loop.launch.record import read_chain
from titan_loop.launch.scheduler import JobStatus, Resources, find_scheduler
from titan_loop.launch.site import Site, find_site, source_site, split_words
from titan_loop.launcher import current_task
from titan_loop.tables import columns

SAVE_SECONDS = 300


def submit(
    recipe: str,
    flags: Sequence[str],
    *,
    nodes: int,
    gpus_per_node: str,
    time: str,
    ranks_per_node: int | None = None,
    sbatch: str = "",
    save_seconds: int = SAVE_SECONDS,
    stage: str | None = None,
    dump_folder: str = "",
    site: str | None = None,
    no_node_check: bool = False,
    dry_run: bool = False,
) -> None:
    """Submit one job for each stage of a recipe that is not complete, chained by afterok.

    All other flags are flags of titan-loop train.

    Args:
        recipe: Name that `titan-loop recipes` lists, or PACKAGE.MODULE:FUNCTION.
        nodes: Number of nodes of every job.
        gpus_per_node: Number of GPUs per node, one rank each, or TYPE:NUMBER such as a100:8; 0 on a
            cluster of CPUs.
        time: Time limit of a job, H:M:S or D-H:M:S; unfinished jobs are requeued.
        ranks_per_node: Number of ranks per node on a cluster of CPUs.
        sbatch: More flags for sbatch, such as '--qos=long --exclusive --mail-type=END'.
        save_seconds: Seconds before the time limit at which the run is told to save; enough for a
            step, an evaluation and a save.
        stage: Submit this stage alone; its parent must be complete.
        dump_folder: Folder of the recipe; by default the recipe's own.
        site: File with the cluster's settings; by default slurm/site.sh if it exists.
        no_node_check: Train without checking the nodes first.
        dry_run: Print the scripts and submit nothing.
    """
    kind, _, count = gpus_per_node.rpartition(":")
    if not count.isdigit():
        raise UserError(
            f"--gpus-per-node={gpus_per_node} is not a number or TYPE:NUMBER, such as 8 or a100:8"
        )
    gpus = int(count)
    if gpus == 0 and ranks_per_node is None:
        raise UserError("--gpus-per-node=0 leaves the number of ranks open; add --ranks-per-node")
    site_file = find_site(site)
    environment = source_site(site_file)
    scheduler = find_scheduler(environment)
    resources = Resources(
        nodes=nodes,
        ranks_per_node=ranks_per_node or gpus,
        gpus_per_node=gpus,
        time=time,
        save_seconds=save_seconds,
        gpu_type=kind,
        flags=split_words("--sbatch", sbatch),
    )

    import titan_loop.compat as compat

    with compat.assuming("cuda" if gpus else "cpu"):  # the jobs' device
        resolved = resolve_recipe(recipe, flags, only=stage)
    names = [one.name for one in resolved.stages]

    from titan_loop.launch.submit import Request, plan_jobs, submit_jobs

    request = Request(
        recipe=resolved,
        train={name: (recipe, *flags_of_stage(flags, names, name)) for name in names},
        only=stage,
        folder=dump_folder,
        resources=resources,
        site=Site.of(environment, site_file),
        check_nodes=not no_node_check,
        environment=environment,
    )
    root, jobs = plan_jobs(request, scheduler)
    if site_file is None:
        print(
            "titan-loop: no site file: jobs get this shell's environment and the cluster's default "
            "partition; copy slurm/site.sh.example to slurm/site.sh and fill it in",
            file=sys.stderr,
        )
    if dry_run:
        for job in jobs:
            after = "" if job.parent is None else f", after {job.parent}"
            print(f"# stage {job.stage}{after}\n{job.script}")
        return
    for name, number in submit_jobs(request, root, jobs, scheduler).items():
        print(f"{name}: job {number}")
    print(f"titan-loop slurm status {root}")


def status(folder: Path) -> None:
    """Show the jobs of a recipe's folder, and the progress of its stages.

    Args:
        folder: Folder of the recipe, whose jobs `slurm submit` recorded.
    """
    shown = [field for field in JobStatus._fields if field != "is_active"]
    rows = [
        (stage, *(str(getattr(job, field)) for field in shown))
        for stage, job in read_chain(folder, find_scheduler())
    ]
    print("\n".join(columns([("stage", *shown), *rows], left=range(len(shown) + 1))))

    from titan_loop.runs.status import RECIPE_JSON, read_status, status_lines

    # Before the first job has started, neither file exists.
    if any((folder / name).exists() for name in (RECIPE_JSON, "run.json")):
        print("\n" + "\n".join(status_lines(read_status(folder))))


def cancel(folder: Path) -> list[str]:
    """Cancel the jobs of a recipe's folder.

    A job that is training saves first, within SLURM's KillWait.

    Args:
        folder: Folder of the recipe, whose jobs `slurm submit` recorded.
    """
    scheduler = find_scheduler()
    active = [(stage, job) for stage, job in read_chain(folder, scheduler) if job.is_active]
    # Children first: a parent that completes meanwhile must not start one.
    for _, job in reversed(active):
        scheduler.cancel(job.job)
    cancelled = [f"{stage}: cancelled job {job.job}" for stage, job in active]
    return cancelled or ["no job is waiting or running"]


def run_in_job(
    recipe: str,
    flags: Sequence[str],
    node: NodeCheck,
    *,
    dump_folder: str,
    stage: str | None = None,
    save_seconds: int = SAVE_SECONDS,
    no_node_check: bool = False,
) -> int:
    """Train in this SLURM job, and requeue the job until the recipe is done.

    A batch script calls it. All other flags are flags of titan-loop train.

    Args:
        recipe: Name that `titan-loop recipes` lists, or PACKAGE.MODULE:FUNCTION.
        node: Requirements of a node.
        dump_folder: Folder of the recipe.
        stage: Train this stage alone.
        save_seconds: Seconds before the time limit for the save: the N of --signal=B:USR1@N.
        no_node_check: Train without checking the nodes first.
    """
    from titan_loop.launch.job import Job, run_job

    require_at_least(1, **{"--save-seconds": save_seconds})
    job = Job(
        train=(recipe, *flags),
        folder=Path(dump_folder).absolute(),
        stage=stage,
        save_seconds=save_seconds,
        check=None if no_node_check else node,
    )
    return run_job(job, find_scheduler())


def check_node(needs: NodeCheck, *, reports: Path, folder: Path, gpus: int, node_port: int) -> None:
    """Check this rank's node and write a report; `slurm run` starts it on all nodes.

    Args:
        needs: Requirements of a node.
        reports: Folder of the reports.
        folder: Folder the run will write to.
        gpus: Number of GPUs the node must have.
        node_port: Port on which the ranks of a node meet.
    """
    if current_task() is None:
        raise UserError("slurm check-node is a task of a SLURM step: slurm run starts it")

    node_check.check_node(needs, reports=reports, folder=folder, gpus=gpus, node_port=node_port)


VERBS = {
    "submit": submit,
    "status": status,
    "cancel": cancel,
    "run": run_in_job,
    "check-node": check_node,
}
run = group("slurm", VERBS)
