"""`titan-loop plot FOLDERS…`: losses per recurrent step, exit distribution and depths as PNGs."""

from pathlib import Path

from titan_loop.cli.arguments import command
from titan_loop.errors import UserError


@command("plot")
def run(folders: tuple[Path, ...]) -> None:
    """Draw every plot a run has data for into its plots/ folder, and print the paths.

    For a recipe's folder: the loss over all stages, and the plots of each stage that has begun. Of
    several runs: their losses in one plot and, if titan-loop eval scored them, their bits per byte
    in another, both in the first one's plots/.

    Args:
        folders: Run directories, or one recipe's folder.
    """
    from titan_loop.analysis.depth_plots import compare_depths
    from titan_loop.analysis.recipe_plot import compare_losses, plot_stages
    from titan_loop.analysis.report import plot_run
    from titan_loop.runs.run_directory import RunDirectory
    from titan_loop.runs.status import read_plan

    recipes = [folder for folder in folders if read_plan(folder)]
    if not folders or (recipes and len(folders) > 1):
        raise UserError("plot takes runs, or one recipe's folder; name at least one")
    runs = [*folders]
    if recipes:
        print(plot_stages(recipes[0]))
        runs = sorted(path.parent for path in recipes[0].glob("*/metrics.jsonl"))
    elif len(runs) > 1:
        plots, directories = runs[0] / "plots", [RunDirectory(folder) for folder in runs]
        print(compare_losses(directories, plots / "compared_losses.png"))
        if (path := compare_depths(directories, plots / "compared_bits_per_byte.png")) is not None:
            print(path)
        return
    for run_directory in map(RunDirectory, runs):
        for path in plot_run(run_directory):
            print(path)
