"""`titan-loop upcycle CHECKPOINT --output RUN --layers N`: more layers, by duplication."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_loop.cli.parser import Parser
from titan_loop.errors import EXIT_OK


def run(arguments: Sequence[str]) -> int:
    """Write the new run, and compare both models if asked."""
    parser = Parser(
        "upcycle",
        "Duplicate the layers of a checkpoint into a new run directory, which train and eval take "
        "like any other. See titan_loop/checkpoint/UPCYCLING.md.",
    )
    parser.add_argument(
        "checkpoint", help="a run, whose newest checkpoint is taken, or its checkpoints/step-N"
    )
    parser.add_argument("--output", required=True, help="the new run directory")
    parser.add_argument("--layers", type=int, required=True, help="a multiple of those there are")
    parser.add_argument(
        "--mode",
        default="stacked",
        help="stacked repeats the stack, interleaved puts every layer next to its copies",
    )
    parser.add_argument(
        "--moments",
        default="scale",
        help="AdamW's moments of the copies: duplicate them, scale both by 1/copies, or reset",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="score both models on held-out text at every recurrent step",
    )
    parser.add_argument(
        "--windows", type=int, default=64, help="held-out windows per source in the report"
    )
    given = parser.parse(arguments)

    from titan_loop.checkpoint.upcycling import Upcycling
    from titan_loop.evaluation.upcycling_report import held_out_sources, report_upcycling
    from titan_loop.runs.conversion import upcycle_run
    from titan_loop.runs.run_directory import RunDirectory

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    upcycling = Upcycling(given.layers, given.mode, given.moments)
    source = Path(given.checkpoint)
    # Read first: what is missing is said before the work.
    held_out = held_out_sources(source, windows=given.windows) if given.report else None
    parent, child = upcycle_run(source, Path(given.output), upcycling, sys.argv)
    print(child)
    if held_out is not None:
        report = report_upcycling(parent, child, held_out)
        print(report.table())
        print(f"The report is in {report.save(RunDirectory(given.output))}")
    print(
        f"To train it: the parent's recipe with --dump-folder {given.output} --model.n-layers "
        f"{given.layers}"
    )
    return EXIT_OK
