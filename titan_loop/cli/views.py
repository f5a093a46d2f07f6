"""Verbs of one function: looking at runs, fitting laws to them, and deepening a checkpoint."""

import logging
import os
import sys
from pathlib import Path
from shlex import quote
from typing import Literal

from titan_loop.cli.arguments import command
from titan_loop.errors import UserError, require_at_least
from titan_loop.tables import columns


@command("status")
def status(folder: Path) -> None:
    """Show the progress of a recipe's stages, or of one run.

    Args:
        folder: Recipe's folder, or a run directory.
    """
    from titan_loop.runs.status import read_status, status_lines

    print("\n".join(status_lines(read_status(folder))))


@command("recipes")
def recipes() -> None:
    """List the recipes that `titan-loop train` finds by name, by paper or study."""
    from titan_loop.recipes.registry import recipes_by_study

    studies = recipes_by_study()
    lines = iter(columns((row for each in studies.values() for row in each.items()), left=(0, 1)))
    for study, named in studies.items():
        print(study)
        for _ in named:
            print(f"  {next(lines)}")
        print()
    print("Your own: titan-loop train PACKAGE.MODULE:FUNCTION")


@command("report")
def report(run: Path, *, stage: str | None = None) -> None:
    """Write report.html into a run directory.

    The page shows losses per recurrent step, exit distribution and entropy, evaluations, mixture,
    throughput and lineage, with all images inside.

    Args:
        run: Run directory, or a recipe's folder (its newest stage is taken).
        stage: Stage to report instead, if `run` is a recipe's folder.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    from titan_loop.analysis.report import write_report
    from titan_loop.runs.recipe_folder import chosen_run
    from titan_loop.runs.run_directory import RunDirectory

    print(write_report(RunDirectory(chosen_run(run, stage))))


@command("plot")
def plot(folders: tuple[Path, ...]) -> None:
    """Draw every plot a run has data for into its plots/ folder, and print the paths.

    For a recipe's folder: the loss over all stages, and the plots of each stage that has begun. Of
    several runs: their losses in one plot and, if titan-loop eval scored them, their results by
    depth in another, both in the first one's plots/.

    Args:
        folders: Run directories, or one recipe's folder.
    """
    from titan_loop.analysis.depth_plots import compare_depths
    from titan_loop.analysis.recipe_plot import compare_losses, plot_stages
    from titan_loop.analysis.report import plot_run
    from titan_loop.data.load.mixture_sources import named_sources
    from titan_loop.runs.run_directory import RunDirectory
    from titan_loop.runs.status import read_plan

    planned = [folder for folder in folders if read_plan(folder)]
    if not folders or (planned and len(folders) > 1):
        raise UserError("plot takes runs, or one recipe's folder; name at least one")
    runs = [*folders]
    if planned:
        print(plot_stages(planned[0]))
        runs = sorted(path.parent for path in planned[0].glob("*/metrics.jsonl"))
    elif len(runs) > 1:
        paths, plots = [folder.resolve() for folder in runs], runs[0] / "plots"
        parent = os.path.commonpath([path.parent for path in paths])
        names = named_sources([os.path.relpath(path, parent) for path in paths])
        named = {name: RunDirectory(Path(parent, path)) for name, path in names.items()}
        print(compare_losses(named, plots / "compared_losses.png"))
        if (path := compare_depths(named, plots / "compared_depths.png")) is not None:
            print(path)
        return
    for run_directory in map(RunDirectory, runs):
        for path in plot_run(run_directory):
            print(path)


@command("upcycle")
def upcycle(
    checkpoint: Path,
    *,
    output: Path,
    layers: int,
    mode: Literal["stacked", "interleaved"] = "stacked",
    moments: Literal["duplicate", "scale", "reset"] = "scale",
) -> None:
    """Duplicate the layers of a checkpoint into a new run directory.

    `train` and `eval` take the new run like any other. See titan_loop/checkpoint/UPCYCLING.md.

    Args:
        checkpoint: Run (its newest checkpoint is taken) or its checkpoints/step-N.
        output: New run directory.
        layers: Number of layers of the new model, a multiple of the old number.
        mode: stacked repeats the stack; interleaved puts every layer next to its copies.
        moments: Moments of the copies: duplicate, scale (by 1/copies) or reset.
    """
    from titan_loop.checkpoint.upcycling import Upcycling
    from titan_loop.runs.conversion import how_to_train, upcycle_run
    from titan_loop.runs.saved_run import SavedRun

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    upcycling = Upcycling(layers, mode, moments)
    child = upcycle_run(checkpoint, output, upcycling, sys.argv)
    print(child)
    tokens = 2 * SavedRun(output).checkpoint().tokens
    goes_on = f"To train it: titan-loop train {quote(str(output))} --total-tokens {tokens}"
    print(goes_on if tokens else how_to_train(output))  # of an import: no recipe to go on with


@command("scaling")
def scaling(
    runs: tuple[Path, ...] = (),
    *,
    csv: Path | None = None,
    output: Path = Path("scaling"),
    skip: float = 0.0,
    bootstrap: int = 200,
    seed: int = 0,
) -> None:
    """Fit scaling laws to runs or to a table of losses, with confidence intervals.

    Fits three laws in which a recurrent step is worth some parameters: linear, power and bounded.
    The error on the largest sizes, token counts and R, each held out by itself, chooses one of the
    three. Prints the coefficients and writes scaling.json, a plot of the chosen law, and
    losses.csv, the points of the runs as --csv reads them.

    Args:
        runs: Run directories and recipe folders, all trained on the same data.
        csv: Instead of runs, a table of losses with the columns of losses.csv.
        output: Folder for the results.
        skip: Share of every run's tokens, from its start, whose points are not fitted. Early in
            training the loss falls later the larger R is, which no law describes.
        bootstrap: Number of resamplings for each 95 % interval; 0 for no intervals.
        seed: Seed of random starts and resamplings.
    """
    from titan_loop.analysis.scaling.data import read_csv, read_runs, write_csv
    from titan_loop.analysis.scaling.study import study, write_study
    from titan_loop.storage.room import require_writable

    if (csv is None) == (not runs):
        raise UserError("scaling: give either RUNS or --csv FILE")
    require_at_least(0, bootstrap=bootstrap)
    if not 0 <= skip < 1:
        raise UserError(f"skip={skip} must be at least 0 and below 1")
    require_writable(output, f"output={output}")  # before the fits, which take minutes
    points = read_runs(runs) if csv is None else read_csv(csv)
    laws = study(points.late(skip), samples=bootstrap, seed=seed)
    for law in laws:
        print("\n".join(law.lines()))
    source = f"titan-loop scaling {' '.join(map(str, runs or ('--csv', csv)))}"
    source += f" --skip {skip:g}" * bool(skip)
    for path in write_study(laws, output, source=source):
        print(path)
    if csv is None:
        write_csv(points, output / "losses.csv")
