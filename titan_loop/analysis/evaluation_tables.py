"""Tables of evaluations, for the terminal and the report."""

from collections.abc import Mapping, Sequence

from titan_loop.evaluation.depth_report import DepthReport, SourceDepths
from titan_loop.evaluation.task_report import ReadingResult, TaskReport, headline, interval
from titan_loop.tables import text_table


def depth_table(report: DepthReport) -> str:
    """Return bits per byte of every source at every depth, baselines last, lower is better.

    ± is half the width of a 95 % bootstrap interval over documents.
    """
    lines = text_table(depth_rows(report)).splitlines()
    return "\n".join([*lines[:-1], lines[1], lines[-1]])


def depth_rows(report: DepthReport) -> list[list[str]]:
    """Return the rows of `depth_table`, the header first."""
    sources = report.sources
    depths = sorted({depth for source in sources.values() for depth in source.depths})
    baselines = list(dict.fromkeys(name for s in sources.values() for name in s.baselines))
    rows = [["bits per byte", *sources]]
    for depth in depths:
        mark = " (trained)" if depth == report.trained_recurrent_steps else ""
        rows.append([f"R = {depth}{mark}", *(_at_depth(s, depth) for s in sources.values())])
    rows += [[name, *(_baseline(s, name) for s in sources.values())] for name in baselines]
    rows.append(["held-out bytes", *(f"{source.n_bytes:,}" for source in sources.values())])
    return rows


def task_table(report: TaskReport, preferred: Mapping[str, str]) -> str:
    """Return one metric per task at every reading: the task's `preferred` one, else its headline.

    Tasks without a result follow, with the reason.
    """
    readings = list(dict.fromkeys(name for task in report.tasks.values() for name in task))
    lines = []
    if report.tasks:
        lines = [text_table(task_rows(report, readings, preferred), left=(0, 1))]
    lines += [f"skipped {task}: {reason}" for task, reason in report.skipped.items()]
    lines += [f"FAILED {task}: {reason}" for task, reason in report.failures.items()]
    return "\n".join(lines)


def task_rows(
    report: TaskReport, readings: Sequence[str], preferred: Mapping[str, str] | None = None
) -> list[list[str]]:
    """Return a row for each task, or stratum of one, and a column for each reading."""
    rows = [["task", "metric", *readings]]
    for task, results in report.tasks.items():
        metric = headline(next(iter(results.values())).metrics, (preferred or {}).get(task))
        cells = (results.get(reading) for reading in readings)
        rows.append([task, metric, *("-" if c is None else _value(c, metric) for c in cells)])
    return rows


def _value(result: ReadingResult, metric: str) -> str:
    if metric not in result.metrics:
        return "-"
    found = interval(result.metrics, metric)
    half = (found.high - found.low) / 2
    return f"{found.value:.4f}" + (f" ±{half:.4f}" if half else "")


def _at_depth(source: SourceDepths, depth: int) -> str:
    interval = source.depths.get(depth)
    if interval is None:
        return "-"
    return f"{interval.value:.3f} ±{(interval.high - interval.low) / 2:.3f}"


def _baseline(source: SourceDepths, name: str) -> str:
    # Padded to the width of a depth's cell, so that the decimal points line up.
    return f"{source.baselines[name]:.3f}       " if name in source.baselines else "-"
