"""`titan-loop plot RUN`: losses per recurrent step, exit distribution and depths as PNG files."""

from collections.abc import Sequence

from titan_loop.cli.parser import Parser
from titan_loop.errors import EXIT_OK


def run(arguments: Sequence[str]) -> int:
    """Draw the plots and print where they are."""
    parser = Parser("plot", "Draw every plot a run has data for into its plots/ folder.")
    parser.add_argument("run", help="the run directory")
    given = parser.parse(arguments)

    from titan_loop.analysis.plots import plot_run
    from titan_loop.training.run_directory import RunDirectory

    for path in plot_run(RunDirectory(given.run)):
        print(path)
    return EXIT_OK
