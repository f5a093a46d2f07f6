"""Tables of evaluations, for the terminal and the report."""

from collections.abc import Mapping, Sequence

from titan_loop.evaluation.task_report import ReadingResult, TaskReport, headline, interval
from titan_loop.tables import text_table


def reading_table(report: TaskReport) -> str:
    """Return bits per byte of held-out text, a row for each reading and a column for each source.

    ± is half the width of a 95 % bootstrap interval over documents.
    """
    trained = f"static:{report.trained_recurrent_steps}"
    rows = [["bits per byte", *(name.partition("/")[2] for name in report.tasks)]]
    for reading in dict.fromkeys(name for readings in report.tasks.values() for name in readings):
        mark = " (trained)" if reading == trained else ""
        cells = (
            _value(readings.get(reading), "bits_per_byte") for readings in report.tasks.values()
        )
        rows.append([reading.replace("static:", "R = ") + mark, *cells])
    return text_table(rows, left=range(len(rows[0])))


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
        rows.append([task, metric, *(_value(results.get(each), metric) for each in readings)])
    return rows


def _value(result: ReadingResult | None, metric: str) -> str:
    if result is None or metric not in result.metrics:
        return "-"
    found = interval(result.metrics, metric)
    half = (found.high - found.low) / 2
    return f"{found.value:.4f}" + (f" ±{half:.4f}" if half else "")
