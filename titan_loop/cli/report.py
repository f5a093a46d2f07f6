"""`titan-loop report RUN`: one HTML page of a run that opens anywhere, without a network."""

from titan_loop.cli.arguments import command


def report(run: str) -> None:
    """Write report.html into a run directory.

    The page shows losses per recurrent step, exit distribution and entropy, evaluations, mixture,
    throughput and lineage, with all images inside.

    Args:
        run: Run directory.
    """
    from titan_loop.analysis.report import write_report
    from titan_loop.runs.run_directory import RunDirectory

    print(write_report(RunDirectory(run)))


run = command("report", report)
