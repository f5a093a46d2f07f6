"""`titan-loop report RUN`: one HTML page of a run that opens anywhere, without a network."""

from collections.abc import Sequence

from titan_loop.cli.parser import Parser
from titan_loop.errors import EXIT_OK


def run(arguments: Sequence[str]) -> int:
    """Write the page and print where it is."""
    parser = Parser(
        "report",
        "Write report.html into a run directory: losses per recurrent step, exit distribution and "
        "entropy, evaluations, mixture, throughput and lineage, with all images inside.",
    )
    parser.add_argument("run", help="the run directory")
    given = parser.parse(arguments)

    from titan_loop.analysis.report import write_report
    from titan_loop.runs.run_directory import RunDirectory

    print(write_report(RunDirectory(given.run)))
    return EXIT_OK
