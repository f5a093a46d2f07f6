"""`titan-loop plot FOLDER`: losses per recurrent step, exit distribution and depths as PNGs."""

from pathlib import Path

from titan_loop.cli.arguments import command


@command("plot")
def run(folder: Path) -> None:
    """Draw every plot a run has data for into its plots/ folder, and print the paths.

    For a recipe's folder: the loss over all stages, and the plots of each stage that has begun.

    Args:
        folder: Run directory, or a recipe's folder.
    """
    from titan_loop.analysis.recipe_plot import plot_stages
    from titan_loop.analysis.report import plot_run
    from titan_loop.runs.run_directory import RunDirectory
    from titan_loop.runs.status import read_plan

    runs = [folder]
    if read_plan(folder):
        print(plot_stages(folder))
        runs = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
    for run_directory in map(RunDirectory, runs):
        for path in plot_run(run_directory):
            print(path)
