"""`titan-loop eval RUN`: held-out bits per byte of the last checkpoint at several depths."""

import logging
from collections.abc import Sequence

from titan_loop.cli.parser import Parser
from titan_loop.errors import EXIT_OK

DEPTHS = (1, 2, 3, 4, 5, 6)


def run(arguments: Sequence[str]) -> int:
    """Evaluate, print the table and say where the report is."""
    parser = Parser(
        "eval",
        "Score the newest checkpoint of a run on held-out text at several depths, beside a unigram "
        "and a bigram model fitted on the tokens it has read.",
    )
    parser.add_argument("run", help="the run directory")
    parser.add_argument(
        "--depths", type=int, nargs="+", default=list(DEPTHS), help="recurrent steps to score"
    )
    parser.add_argument(
        "--windows", type=int, default=64, help="held-out windows per source, always the same ones"
    )
    given = parser.parse(arguments)

    from titan_loop.analysis.tables import depth_table
    from titan_loop.evaluation.evaluate_run import evaluate_run
    from titan_loop.training.run_directory import RunDirectory

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_directory = RunDirectory(given.run)
    print(depth_table(evaluate_run(run_directory, depths=given.depths, windows=given.windows)))
    print(f"The report is in {run_directory.evaluations}")
    return EXIT_OK
