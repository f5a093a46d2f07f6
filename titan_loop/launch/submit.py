"""Submits a recipe: one batch script and one job for each stage that is not complete.

A stage's job waits for the job of its parent. Mistakes are looked for before the first job is
submitted. A script has directives, the site file and one command; the command has all the logic.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import titan_loop.compat as compat  # before any torchtitan module

from titan_loop.errors import RunFailedError, UserError, require_at_least
from titan_loop.launch.record import read_chain, records_folder, write_jobs
from titan_loop.launch.scheduler import Resources, Scheduler, SchedulerError
from titan_loop.launch.site import Site
from titan_loop.recipes.recipe import Recipe
from titan_loop.recipes.start import check_placed, is_complete


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A recipe to submit.

    Attributes:
        train: Stage → arguments of `titan-loop train`: the recipe's name and the stage's flags.
        only: Stage to submit alone; None for all that are not complete.
        folder: Folder for the stages' run directories; empty for the recipe's own.
    """

    recipe: Recipe
    train: Mapping[str, tuple[str, ...]]
    only: str | None = None
    folder: str = ""
    resources: Resources
    site: Site
    check_nodes: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Planned:
    """A job before it is submitted: its stage, the parent whose job it waits for, its script."""

    stage: str
    parent: str | None
    script: str


def plan_jobs(request: Request, scheduler: Scheduler) -> tuple[Path, list[Planned]]:
    """Return the recipe's folder and the jobs still to do; nothing is written or submitted."""
    resources = request.resources
    counts = {"--nodes": resources.nodes, "--ranks-per-node": resources.ranks_per_node}
    require_at_least(1, **counts, **{"--save-seconds": resources.save_seconds})
    if resources.gpus_per_node and resources.ranks_per_node > resources.gpus_per_node:
        raise UserError(
            f"--ranks-per-node={resources.ranks_per_node} is more than the "
            f"{resources.gpus_per_node} GPUs of a node; a rank needs one of its own"
        )
    world_size = resources.nodes * resources.ranks_per_node
    with compat.assuming("cuda" if resources.gpus_per_node else "cpu"):
        request.recipe.check()
        root = request.recipe.place(request.folder).absolute()
        stages = check_placed(request.recipe, world_size, only=request.only)
    left = [stage for stage in stages if not is_complete(stage.config)]
    if not left:
        raise UserError(f"every stage in {root} is complete; there is nothing to submit")
    names = {stage.name for stage in left}
    parents = {stage.name: stage.parent if stage.parent in names else None for stage in left}
    return root, [Planned(n, p, _script(request, n, root, scheduler)) for n, p in parents.items()]


def _script(request: Request, stage: str, root: Path, scheduler: Scheduler) -> str:
    alone = len(request.recipe.stages) == 1
    command = ["slurm", "run", *request.train[stage], f"--dump-folder={root}"]
    if not alone:
        command.append(f"--stage={stage}")
    command.append(f"--save-seconds={request.resources.save_seconds}")
    if not request.check_nodes:
        command.append("--no-node-check")
    name = request.recipe.name if alone else f"{request.recipe.name}-{stage}"
    log = records_folder(root) / f"{stage}.log"
    return scheduler.script(name, command, log, request.resources, request.site)


def submit_jobs(
    request: Request, root: Path, jobs: list[Planned], scheduler: Scheduler
) -> dict[str, str]:
    """Submit the jobs that `plan_jobs` returned; return stage → job number.

    If the scheduler refuses a job, the jobs submitted before it are cancelled.
    """
    known = read_chain(root, scheduler) if (records_folder(root) / "jobs.json").exists() else []
    if active := [f"{stage}: {job.job}" for stage, job in known if job.is_active]:
        raise UserError(
            f"{root} has jobs already ({', '.join(active)}); wait for them, or titan-loop slurm "
            f"cancel {root}"
        )
    folder = records_folder(root)
    folder.mkdir(parents=True, exist_ok=True)
    numbers: dict[str, str] = {}
    for job in jobs:
        script = folder / f"{job.stage}.sbatch"
        script.write_text(job.script, encoding="utf-8")
        after = None if job.parent is None else numbers[job.parent]
        try:
            numbers[job.stage] = scheduler.submit(
                script, after=after, environment=request.environment
            )
        except RunFailedError as error:
            for number in reversed(numbers.values()):
                scheduler.cancel(number)
            if not isinstance(error, SchedulerError):
                raise
            raise RunFailedError(
                f"stage {job.stage} was refused ({error}); nothing else is queued"
            ) from error
    write_jobs(root, numbers)
    return numbers
