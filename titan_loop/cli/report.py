"""`titan-loop report RUN`: one HTML page of a run that opens anywhere, without a network."""

import logging
from pathlib import Path

from titan_loop.cli.arguments import command


@command("report")
def run(run: Path, *, stage: str | None = None) -> None:
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
