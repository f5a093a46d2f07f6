"""Submits a recipe: one batch script and one job for each stage that is not complete.

A stage's job waits for the job of its parent. Mistakes are looked for before the first job is
submitted. A script has directives, the site file and one command; the command has all the logic.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import titan_loop.compat as compat  # before any torchtitan module

from titan_loop.errors import RunFailedError, UserError, nearest, require_at_least
from titan_loop.recipes.recipe import Recipe
from titan_loop.recipes.start import check_placed, is_complete
from titan_loop.slurm.chain import read_chain
from titan_loop.slurm.commands import (
    CommandFailedError,
    outside_of_a_job,
    parse_seconds,
    sbatch,
    show,
    slurm,
)
from titan_loop.slurm.memory_check import memory_remarks
from titan_loop.slurm.record import slurm_folder, write_jobs
from titan_loop.slurm.site import Site

_OWN_DIRECTIVES = {
    "--nodes": "--nodes",
    "--ntasks-per-node": "--gpus-per-node or --ranks-per-node",
    "--gpus-per-node": "--gpus-per-node",
    "--time": "--time",
    "--signal": "--save-seconds",
    "--job-name": "the recipe's name",
    "--output": "the folder's slurm/STAGE.log",
    "--open-mode": "no flag: restarts append to the log",
    "--requeue": "no flag: it is always on",
    "--no-requeue": "no flag: restarts need requeueing",
    "--dependency": "the recipe's parents",
    "--array": "titan-loop slurm submit once for each run",
    "--partition": "SBATCH_PARTITION",
    "--account": "SBATCH_ACCOUNT",
}
"""Flag of sbatch → the setting to use instead."""

_OVERRIDES = {
    "SBATCH_TIMELIMIT": "--time",
    "SBATCH_GPUS_PER_NODE": "--gpus-per-node",
    "SBATCH_SIGNAL": "--save-seconds",
    "SBATCH_JOB_NAME": "",
    "SBATCH_OPEN_MODE": "",
    "SBATCH_NO_REQUEUE": "",
    "SBATCH_ARRAY_INX": "",
}
"""Variable that sbatch prefers to a script's directive → the flag of `submit` to use instead."""

EARLY_SECONDS = 60
"""SLURM checks time limits only now and then, so its warning may come up to a minute early."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """Resources that every job of a chain asks for; `slurm submit --help` explains them."""

    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    time: str
    save_seconds: int
    gpu_type: str = ""
    sbatch_flags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A recipe to submit.

    Attributes:
        train: Stage → arguments of `titan-loop train`: the recipe's name and the stage's flags.
        only: Stage to submit alone; None for all that are not complete.
        folder: Folder for the stages' run directories; empty for the recipe's own.
        environment: Environment of `sbatch`, and so of the jobs.
    """

    recipe: Recipe
    train: Mapping[str, tuple[str, ...]]
    only: str | None = None
    folder: str = ""
    resources: Resources
    site: Site
    site_file: Path | None
    check_nodes: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Planned:
    """A job before it is submitted: its stage, the parent whose job it waits for, its script."""

    stage: str
    parent: str | None
    script: str


def plan_jobs(request: Request) -> tuple[Path, list[Planned]]:
    """Return the recipe's folder and the jobs still to do; nothing is written or submitted."""
    resources = request.resources
    _check_resources(resources)
    _check_sbatch_flags((*request.site.sbatch_flags, *resources.sbatch_flags))
    for name in _OVERRIDES.keys() & request.environment.keys():
        instead = f" and give {_OVERRIDES[name]}" if _OVERRIDES[name] else ""
        raise UserError(
            f"{name}={request.environment[name]} would override what submit writes; unset it in "
            f"the shell and the site file{instead}"
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
    return root, [Planned(n, p, _script(request, n, root)) for n, p in parents.items()]


def _script(request: Request, stage: str, root: Path) -> str:
    alone = len(request.recipe.stages) == 1
    command = ["slurm", "run", *request.train[stage], f"--dump-folder={root}"]
    if not alone:
        command.append(f"--stage={stage}")
    command.append(f"--save-seconds={request.resources.save_seconds}")
    if not request.check_nodes:
        command.append("--no-node-check")
    name = request.recipe.name if alone else f"{request.recipe.name}-{stage}"
    log = slurm_folder(root) / f"{stage}.log"
    return render_script(name, command, log, request.resources, request.site, request.site_file)


def render_script(
    name: str,
    command: Sequence[str],
    log: Path,
    resources: Resources,
    site: Site,
    site_file: Path | None,
) -> str:
    """Return the batch script of a training job, whose starts all append to `log`."""
    extra = (*site.sbatch_flags, *resources.sbatch_flags)
    gpus = ":".join(filter(None, (resources.gpu_type, str(resources.gpus_per_node))))
    asks_for_gpus = resources.gpus_per_node and not any(flag.startswith("--gres") for flag in extra)
    directives = [
        f"--job-name={name}",
        f"--nodes={resources.nodes}",
        f"--ntasks-per-node={resources.ranks_per_node}",
        *([f"--gpus-per-node={gpus}"] if asks_for_gpus else []),
        f"--time={resources.time}",
        *([f"--partition={shlex.quote(site.partition)}"] if site.partition else []),
        *([f"--account={shlex.quote(site.account)}"] if site.account else []),
        f"--output={shlex.quote(str(log).replace('%', '%%'))}",  # a % begins a pattern
        "--open-mode=append",
        # B: signals the batch step alone, which passes the signal on to the ranks.
        f"--signal=B:USR1@{resources.save_seconds}",
        "--requeue",
        "--kill-on-invalid-dep=yes",
        *(shlex.join([flag]) for flag in extra),
    ]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {directive}" for directive in directives),
        "",
        *([f"source {shlex.quote(str(site_file))}"] if site_file else []),
        f"exec {shlex.join([sys.executable, '-m', 'titan_loop', *command])}",
    ]
    return "\n".join(lines) + "\n"


def submit_jobs(request: Request, root: Path, jobs: list[Planned]) -> dict[str, str]:
    """Submit the jobs that `plan_jobs` returned; return stage → job number.

    If SLURM refuses a job, the jobs submitted before it are cancelled.
    """
    _check_cluster(request.resources, request.site.partition)
    _refuse_second_submission(root)
    folder = slurm_folder(root)
    folder.mkdir(parents=True, exist_ok=True)
    numbers: dict[str, str] = {}
    for job in jobs:
        script = folder / f"{job.stage}.sbatch"
        script.write_text(job.script, encoding="utf-8")
        after = [] if job.parent is None else [f"--dependency=afterok:{numbers[job.parent]}"]
        try:
            numbers[job.stage] = sbatch(
                *after, str(script), environment=outside_of_a_job(request.environment)
            )
        except RunFailedError as error:
            for number in reversed(numbers.values()):
                slurm("scancel", number)
            if not isinstance(error, CommandFailedError):
                raise
            raise RunFailedError(
                f"stage {job.stage} was refused ({error}); nothing is queued"
            ) from error
    write_jobs(root, numbers)
    return numbers


def _check_resources(resources: Resources) -> None:
    counts = {"--nodes": resources.nodes, "--ranks-per-node": resources.ranks_per_node}
    require_at_least(1, **counts, **{"--save-seconds": resources.save_seconds})
    if resources.gpus_per_node and resources.ranks_per_node > resources.gpus_per_node:
        raise UserError(
            f"--ranks-per-node={resources.ranks_per_node} is more than the "
            f"{resources.gpus_per_node} GPUs of a node; a rank needs one of its own"
        )
    needed = resources.save_seconds + EARLY_SECONDS
    if parse_seconds(resources.time) <= needed:
        raise UserError(
            f"--time={resources.time} leaves nothing to train in: saving may take "
            f"--save-seconds={resources.save_seconds}, and SLURM warns up to {EARLY_SECONDS} s "
            f"early; give it more than {needed} s"
        )


def _check_sbatch_flags(flags: Sequence[str]) -> None:
    for flag in flags:
        name = flag.partition("=")[0]
        if not flag.startswith("--") or " " in name:
            raise UserError(
                f"TITAN_LOOP_SBATCH_FLAGS or --sbatch has {flag!r}; write every flag of sbatch as "
                "--NAME or --NAME=VALUE"
            )
        if name in _OWN_DIRECTIVES:
            raise UserError(
                f"TITAN_LOOP_SBATCH_FLAGS or --sbatch has {flag}, which submit sets itself; use "
                f"{_OWN_DIRECTIVES[name]}"
            )


def remarks(request: Request, jobs: Sequence[Planned]) -> list[str]:
    """Return lines about resources that the jobs probably lack; raises as `memory_remarks`."""
    site, resources = request.site, request.resources
    names = {flag.partition("=")[0] for flag in (*site.sbatch_flags, *resources.sbatch_flags)}
    found: list[str] = []
    if request.site_file is None:
        found.append(
            "no site file: jobs get this shell's environment and the cluster's default partition; "
            "copy slurm/site.sh.example to slurm/site.sh and fill it in"
        )
    if not names & {"--exclusive", "--cpus-per-task", "--cpus-per-gpu", "--mem", "--mem-per-gpu"}:
        found.append(
            "nothing asks for CPUs, memory or whole nodes, so a rank may get one CPU and little "
            "memory: set TITAN_LOOP_SBATCH_FLAGS='--exclusive --mem=0', or "
            "--cpus-per-task=N and --mem-per-gpu=SIZE, in the site file"
        )
    if resources.gpus_per_node:
        found += memory_remarks(
            request.recipe,
            [request.recipe.stage(job.stage) for job in jobs],
            name=request.train[jobs[0].stage][0],
            nodes=resources.nodes,
            gpus_per_node=resources.ranks_per_node,
            gpu=resources.gpu_type,
        )
    return found


def _check_cluster(resources: Resources, wanted: str) -> None:
    partitions = slurm("sinfo", "--noheader", "--format=%P").split()
    default = next((name.rstrip("*") for name in partitions if name.endswith("*")), "")
    known = [name.rstrip("*") for name in partitions]
    names = wanted.split(",") if wanted else [default]  # a job runs in any partition of a list
    for name in names if wanted else ():
        if name not in known:
            raise UserError(f"SBATCH_PARTITION={name} does not exist{nearest(name, known)}")
    if not wanted and not default:
        raise UserError(
            "the cluster has no default partition; set SBATCH_PARTITION in the site file to one of "
            + ", ".join(sorted(set(known)))
        )
    problems = [_misfit(resources, show("partition", name)) for name in names]
    if all(problems):
        raise UserError(problems[0])


def _misfit(resources: Resources, fields: Mapping[str, str]) -> str:
    """Return why the jobs do not fit a partition; empty if they do."""
    limits = [fields["TotalNodes"], fields["MaxNodes"]]  # a number, or UNLIMITED
    most = min((int(limit) for limit in limits if limit.isdigit()), default=resources.nodes)
    if resources.nodes > most:
        return (
            f"--nodes={resources.nodes} is more than the {most} that partition "
            f"{fields['PartitionName']} gives a job; ask for fewer, or name another partition"
        )
    longest = fields["MaxTime"]
    if longest != "UNLIMITED" and parse_seconds(resources.time) > parse_seconds(longest):
        return (
            f"--time={resources.time} is more than partition {fields['PartitionName']} allows "
            f"({longest}); ask for less: a job is started again until its stage is done"
        )
    return ""


def _refuse_second_submission(root: Path) -> None:
    if not (slurm_folder(root) / "jobs.json").exists():
        return
    if active := [f"{job.stage}: {job.job}" for job in read_chain(root) if job.is_active]:
        raise UserError(
            f"{root} has jobs already ({', '.join(active)}); wait for them, or titan-loop slurm "
            f"cancel {root}"
        )
