"""`titan-loop slurm VERB`: submit a recipe as a chain of jobs, look at it, cancel it."""

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from titan_loop.cli.parser import Parser
from titan_loop.cli.verbs import run_verb
from titan_loop.errors import EXIT_OK, UserError
from titan_loop.recipes.registry import load_recipe

SAVE_SECONDS = 300


def run(arguments: Sequence[str]) -> int:
    """Run one verb."""
    verbs = {
        "submit": submit,
        "status": status,
        "cancel": cancel,
        "run": run_in_job,
        "check-node": check_node,
    }
    return run_verb("slurm", verbs, arguments)


def submit(arguments: Sequence[str]) -> int:
    """Submit one job for each stage of a recipe that is not complete, chained by afterok."""
    parser = Parser(
        "slurm submit",
        "Submit one job for each stage of RECIPE that is not complete, chained by afterok. Every "
        "other flag is one of titan-loop train and applies to each stage.",
    )
    parser.add_argument("recipe", help="a name of titan-loop recipes, or PACKAGE.MODULE:FUNCTION")
    parser.add_argument("--nodes", type=int, required=True, help="nodes of every job")
    parser.add_argument(
        "--gpus-per-node", type=int, required=True, help="GPUs of a node, a rank each; 0 for CPUs"
    )
    parser.add_argument("--ranks-per-node", type=int, help="on a CPU cluster")
    parser.add_argument("--time", required=True, help="limit of one start, H:M:S or D-H:M:S")
    parser.add_argument(
        "--save-seconds",
        type=int,
        default=SAVE_SECONDS,
        help="how long before the limit the run saves: a step, an evaluation and a save",
    )
    parser.add_argument("--stage", help="only this one; its parent must be complete")
    parser.add_argument("--dump-folder", default="", help="the recipe's folder; empty for its own")
    parser.add_argument("--site", help="settings of the cluster; slurm/site.sh if it is there")
    parser.add_argument("--no-node-check", action="store_true", help="train without looking first")
    parser.add_argument("--dry-run", action="store_true", help="print the scripts, submit nothing")
    given, flags = parser.parse_some(arguments)
    if given.gpus_per_node == 0 and given.ranks_per_node is None:
        raise UserError("--gpus-per-node=0 does not say how many ranks; add --ranks-per-node")
    if not given.dry_run and shutil.which("sbatch") is None:
        raise UserError(
            "sbatch is not on PATH: submit on a login node of the cluster, or look at the scripts "
            "with --dry-run"
        )

    from titan_loop.slurm.site import Site, find_site, source_site

    site_file = find_site(given.site)
    environment = source_site(site_file)
    recipe = load_recipe(given.recipe)

    from titan_loop.cli.stage_flags import apply_to_stages, split_by_stage
    from titan_loop.slurm.submit import Request, Resources, plan_jobs, submit_jobs

    resources = Resources(
        nodes=given.nodes,
        ranks_per_node=given.ranks_per_node or given.gpus_per_node,
        gpus_per_node=given.gpus_per_node,
        time=given.time,
        save_seconds=given.save_seconds,
    )
    apply_to_stages(recipe, flags, f"titan-loop train {given.recipe}", only=given.stage)
    if given.stage is not None and recipe.stage(given.stage).config.checkpoint.carry.parent:
        recipe.stage(given.stage).parent = None  # a fork
    common, own = split_by_stage(flags, [stage.name for stage in recipe.stages])
    request = Request(
        recipe=recipe,
        train={
            stage.name: (given.recipe, *common, *own.get(stage.name, ())) for stage in recipe.stages
        },
        only=given.stage,
        folder=given.dump_folder,
        resources=resources,
        site=Site.of(environment),
        site_file=site_file,
        check_nodes=not given.no_node_check,
        environment=environment,
    )
    root, jobs = plan_jobs(request)
    if given.dry_run:
        for job in jobs:
            after = "" if job.parent is None else f", after {job.parent}"
            print(f"# stage {job.stage}{after}\n{job.script}")
        return EXIT_OK
    for stage, number in submit_jobs(request, root, jobs).items():
        print(f"{stage}: job {number}")
    print(f"titan-loop slurm status {root}")
    return EXIT_OK


def status(arguments: Sequence[str]) -> int:
    """Show the jobs of a recipe's folder, and how far its stages are."""
    parser = Parser("slurm status", "Show a recipe's jobs, and how far its stages are.")
    parser.add_argument("folder", type=Path, help="the recipe's folder")
    folder = parser.parse(arguments).folder

    from titan_loop.slurm.chain import chain_lines, read_chain

    print("\n".join(chain_lines(read_chain(folder))))

    from titan_loop.runs.status import RECIPE_JSON, read_status, status_lines

    # The first start of the first job writes them.
    if any((folder / name).exists() for name in (RECIPE_JSON, "run.json")):
        print("\n" + "\n".join(status_lines(read_status(folder))))
    return EXIT_OK


def cancel(arguments: Sequence[str]) -> int:
    """Cancel the jobs of a recipe's folder; those that train save first."""
    parser = Parser(
        "slurm cancel", "Cancel a recipe's jobs. What trains has SLURM's KillWait to save."
    )
    parser.add_argument("folder", type=Path, help="the recipe's folder")

    from titan_loop.slurm.chain import cancel_chain

    cancelled = cancel_chain(parser.parse(arguments).folder)
    for job in cancelled:
        print(f"{job.stage}: cancelled job {job.job}")
    if not cancelled:
        print("no job waits or runs")
    return EXIT_OK


def run_in_job(arguments: Sequence[str]) -> int:
    """Train in the job this runs in; what a batch script calls."""
    parser = Parser(
        "slurm run",
        "Train in the SLURM job this runs in, and start the job again until it is done. Every "
        "other flag is one of titan-loop train.",
    )
    parser.add_argument("recipe", help="a name of titan-loop recipes, or PACKAGE.MODULE:FUNCTION")
    parser.add_argument("--stage", help="only this one")
    parser.add_argument("--dump-folder", required=True, help="the recipe's folder")
    parser.add_argument(
        "--save-seconds",
        type=int,
        default=SAVE_SECONDS,
        help="the N of --signal=B:USR1@N in the batch script",
    )
    _add_check_flags(parser)
    parser.add_argument("--no-node-check", action="store_true", help="train without looking first")
    given, flags = parser.parse_some(arguments)

    from titan_loop.slurm.health import NodeCheck
    from titan_loop.slurm.job import Job, run_job

    if given.save_seconds < 1:
        raise UserError(f"--save-seconds={given.save_seconds} must be at least 1")
    check = NodeCheck(
        free_disk_gigabytes=given.free_disk_gigabytes, free_memory_share=given.free_memory_share
    )
    return run_job(
        Job(
            train=(given.recipe, *flags),
            folder=Path(given.dump_folder).absolute(),
            stage=given.stage,
            save_seconds=given.save_seconds,
            check=None if given.no_node_check else check,
        )
    )


def check_node(arguments: Sequence[str]) -> int:
    """Check the node of one rank; what `slurm run` starts on all of them."""
    parser = Parser("slurm check-node", "Check this rank's node and write a report.")
    parser.add_argument("--reports", type=Path, required=True, help="folder of the reports")
    parser.add_argument("--folder", type=Path, required=True, help="where the run will write")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs the node must have")
    parser.add_argument("--node-port", type=int, required=True, help="ranks of a node meet here")
    _add_check_flags(parser)
    given = parser.parse(arguments)
    if "SLURM_PROCID" not in os.environ:
        raise UserError("slurm check-node is a task of a SLURM step: slurm run starts it")

    from titan_loop.slurm.node_check import check_node

    check_node(**vars(given))
    return EXIT_OK


def _add_check_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--free-disk-gigabytes", type=float, default=1.0, help="in the folder and in TMPDIR"
    )
    parser.add_argument(
        "--free-memory-share", type=float, default=0.9, help="of every GPU's memory"
    )
