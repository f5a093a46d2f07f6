"""`titan-loop plot FOLDER`: losses per recurrent step, exit distribution and depths as PNGs."""

from collections.abc import Sequence
from pathlib import Path

from titan_loop.cli.parser import Parser
from titan_loop.errors import EXIT_OK


def run(arguments: Sequence[str]) -> int:
    """Draw the plots and print where they are."""
    parser = Parser(
        "plot",
        "Draw every plot a run has data for into its plots/ folder; of a recipe's folder the loss "
        "over all stages, and the plots of each that has begun.",
    )
    parser.add_argument("folder", help="a run directory, or a recipe's folder")
    given = parser.parse(arguments)

    from titan_loop.analysis.plots import plot_run
    from titan_loop.analysis.recipe_plot import plot_stages
    from titan_loop.runs.run_directory import RunDirectory
    from titan_loop.runs.status import RECIPE_JSON

    folder = Path(given.folder)
    runs = [folder]
    if (folder / RECIPE_JSON).exists():
        print(plot_stages(folder))
        runs = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
    for run_folder in runs:
        for path in plot_run(RunDirectory(run_folder)):
            print(path)
    return EXIT_OK
