"""Quality against average recurrent steps and time: every exit policy beside static depth."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from titan_loop.analysis.drawing import COLORS, GREY, Axes, draw_panels
from titan_loop.errors import UserError
from titan_loop.evaluation.task_report import (
    SECONDS,
    ReadingResult,
    TaskReport,
    headline,
    interval,
    lower_is_better,
)
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.tables import text_table

_STYLES = {
    "static": ("static depth", "0.1", "o-"),
    "q": ("Q-exit (gate)", COLORS[0], "s-"),
    "hidden": ("hidden-state difference", COLORS[1], "^--"),
    "fixed_point": ("fixed point (relative difference)", GREY, "v:"),
    "margin": ("margin of the likeliest", COLORS[4], "<--"),
    "confidence": ("confidence", COLORS[3], "P-."),
    "kl": ("KL and entropy", COLORS[2], "D:"),
}
"""Title, colour and line of each policy; plug-ins' policies come after them."""


class FrontierPoint(NamedTuple):
    """One reading of one task.

    Attributes:
        low: Lower end of the value's 95 % interval; the value where the task has no intervals.
        seconds: Seconds per generated token; None where they were not measured.
    """

    task: str
    metric: str
    policy: str
    reading: str
    mean_steps: float
    value: float
    low: float
    high: float
    seconds: float | None = None


def frontier_points(report: TaskReport) -> list[FrontierPoint]:
    """Return the points of every task that was read by more than static depth, by mean steps."""
    points = []
    for task, readings in report.tasks.items():
        if len({name.partition(":")[0] for name in readings}) < 2:
            continue
        points += [
            _point(task, name, result)
            for name, result in readings.items()
            if result.mean_steps is not None and result.metrics
        ]
    order = [*_STYLES, *sorted({point.policy for point in points} - _STYLES.keys())]
    return sorted(points, key=lambda p: (p.task, order.index(p.policy), p.mean_steps))


def _point(task: str, reading: str, result: ReadingResult) -> FrontierPoint:
    metric, policy = headline(result.metrics), reading.partition(":")[0]
    assert result.mean_steps is not None
    found = interval(result.metrics, metric)
    seconds = result.metrics.get(SECONDS)
    return FrontierPoint(task, metric, policy, reading, result.mean_steps, *found, seconds)


def frontier_table(points: Sequence[FrontierPoint]) -> str:
    """Return the points as aligned text."""
    rows = [["task", "reading", "mean steps", "ms a token", "value", "95 %", "metric"]]
    for p in points:
        spread = "" if p.low == p.high else f"{p.low:.4f} to {p.high:.4f}"
        milliseconds = "" if p.seconds is None else f"{1e3 * p.seconds:.2f}"
        values = [f"{p.mean_steps:.2f}", milliseconds, f"{p.value:.4f}", spread]
        rows.append([p.task, p.reading, *values, p.metric])
    return text_table(rows, left=(0, 1, 6))


def plot_frontier(
    points: Sequence[FrontierPoint],
    path: Path,
    *,
    title: str,
    dense: Mapping[str, FrontierPoint] | None = None,
) -> Path:
    """Draw each task's metric with its intervals: one line per policy, and a level one for `dense`.

    Each task has a panel against mean steps and, where they were measured, one against seconds.
    """
    panels: dict[str, tuple[str, bool]] = {}
    for task in dict.fromkeys(point.task for point in points):
        panels[task] = task, False
        if any(point.seconds is not None for point in points if point.task == task):
            panels[f"{task}, time"] = task, True

    def draw(axes: Axes, panel: str) -> None:
        task, timed = panels[panel]
        mine = [p for p in points if p.task == task and not (timed and p.seconds is None)]
        for policy in dict.fromkeys(point.policy for point in mine):
            _draw_policy(axes, [point for point in mine if point.policy == policy], timed=timed)
        if dense is not None and task in dense:
            axes.axhline(dense[task].value, color="0.5", linestyle="--", label="dense model")
        better = "lower" if lower_is_better(mine[0].metric) else "higher"
        axes.set_ylabel(f"{mine[0].metric} ({better} is better)")
        axes.set_xlabel("ms per generated token" if timed else "mean recurrent steps per token")

    columns = 2 if len(panels) > len({task for task, _ in panels.values()}) else 3
    return draw_panels([*panels], draw, path, title=title, columns=columns, inches=(6.0, 3.9))


def _draw_policy(axes: Axes, mine: Sequence[FrontierPoint], *, timed: bool) -> None:
    label, color, line = _STYLES.get(mine[0].policy, (mine[0].policy, GREY, "x--"))
    if timed:
        mine = sorted(mine, key=lambda point: point.seconds or 0.0)
    values = [point.value for point in mine]
    below = [max(point.value - point.low, 0.0) for point in mine]
    above = [max(point.high - point.value, 0.0) for point in mine]
    costs = [1e3 * (point.seconds or 0.0) if timed else point.mean_steps for point in mine]
    style = {"color": color, "ecolor": color, "elinewidth": 0.5, "markersize": 4, "label": label}
    axes.errorbar(costs, values, yerr=[below, above], fmt=line, **style)


class WrittenFrontier(NamedTuple):
    """Points and the files they were written to."""

    points: list[FrontierPoint]
    csv: Path
    png: Path


def dense_reports(dense: Path) -> list[TaskReport]:
    """Return the evaluations of a dense run; raises `UserError` if it has none."""
    reports = TaskReport.all_of(RunDirectory(dense))
    if not reports:
        raise UserError(
            f"dense={dense} was not evaluated on tasks; run titan-loop eval {dense} --tasks … first"
        )
    return reports


def dense_points(report: TaskReport, dense: Path) -> dict[str, FrontierPoint]:
    """Return task → point of a dense run at its own R, from its newest evaluation of that task."""
    reports = dense_reports(dense)
    found: dict[str, FrontierPoint] = {}
    for task, readings in report.tasks.items():
        asked = [result.settings for result in readings.values()]
        same = [
            other
            for other in reports
            if any(result.settings in asked for result in other.tasks.get(task, {}).values())
        ]
        if same:
            newest = same[-1].tasks[task]
            if (name := f"static:{same[-1].trained_recurrent_steps}") in newest:
                found[task] = _point(task, name, newest[name])
    if not found:
        raise UserError(
            f"dense={dense} was evaluated on none of {', '.join(report.tasks)} with the same "
            "settings; evaluate it with the same flags"
        )
    return found


def write_frontier(
    report: TaskReport, run_directory: RunDirectory, dense: Path | None = None
) -> WrittenFrontier | None:
    """Write `evals/frontier-step-N.csv` and `plots/frontier.png`; None without any points."""
    points = frontier_points(report)
    if not points:
        return None
    path = run_directory.evaluations / f"frontier-step-{report.step}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FrontierPoint._fields)
        writer.writerows(points)
    first = [point for point in points if point.task == points[0].task]
    sign = -1 if lower_is_better(first[0].metric) else 1
    best = max(first, key=lambda point: (sign * point.value, -point.mean_steps))
    title = f"{best.task}: {best.reading} is best, with {best.mean_steps:.2f} steps on average"
    beside = None if dense is None else dense_points(report, dense)
    png = run_directory.plots / "frontier.png"
    return WrittenFrontier(points, path, plot_frontier(points, png, title=title, dense=beside))
