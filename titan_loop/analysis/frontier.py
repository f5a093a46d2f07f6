"""Quality against average recurrent steps: every exit policy beside static depth."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from titan_loop.analysis.drawing import COLORS, GREY, Axes, draw_panels
from titan_loop.evaluation.task_report import TaskReport, headline, interval, lower_is_better
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
    """

    task: str
    metric: str
    policy: str
    reading: str
    mean_steps: float
    value: float
    low: float
    high: float


def frontier_points(report: TaskReport) -> list[FrontierPoint]:
    """Return the points of every task that was read by more than static depth, by mean steps."""
    points: list[FrontierPoint] = []
    for task, readings in report.tasks.items():
        mine: list[FrontierPoint] = []
        for name, result in readings.items():
            if result.mean_steps is not None and result.metrics:
                metric, policy = headline(result.metrics), name.partition(":")[0]
                found = interval(result.metrics, metric)
                mine.append(FrontierPoint(task, metric, policy, name, result.mean_steps, *found))
        if len({point.policy for point in mine}) > 1:
            points += mine
    order = [*_STYLES, *sorted({point.policy for point in points} - _STYLES.keys())]
    return sorted(points, key=lambda p: (p.task, order.index(p.policy), p.mean_steps))


def frontier_table(report: TaskReport) -> str:
    """Return the points as aligned text."""
    rows = [["task", "reading", "mean steps", "value", "95 %", "metric"]]
    for p in frontier_points(report):
        spread = "" if p.low == p.high else f"{p.low:.4f} to {p.high:.4f}"
        rows.append([p.task, p.reading, f"{p.mean_steps:.2f}", f"{p.value:.4f}", spread, p.metric])
    return text_table(rows, left=(0, 1, 5))


def plot_frontier(points: Sequence[FrontierPoint], path: Path, *, title: str) -> Path:
    """Draw each task's metric with its intervals: one line per policy."""

    def draw(axes: Axes, task: str) -> None:
        for policy in dict.fromkeys(point.policy for point in points if point.task == task):
            label, color, line = _STYLES.get(policy, (policy, GREY, "x--"))
            mine = [point for point in points if (point.task, point.policy) == (task, policy)]
            below = [max(point.value - point.low, 0.0) for point in mine]
            above = [max(point.high - point.value, 0.0) for point in mine]
            style = {"color": color, "elinewidth": 0.5, "markersize": 4, "label": label}
            values = [point.value for point in mine]
            steps = [point.mean_steps for point in mine]
            axes.errorbar(steps, values, yerr=[below, above], fmt=line, **style)
        metric = next(point.metric for point in points if point.task == task)
        better = "lower" if lower_is_better(metric) else "higher"
        axes.set_ylabel(f"{metric} ({better} is better)")
        axes.set_xlabel("mean recurrent steps per token")

    tasks = dict.fromkeys(point.task for point in points)
    return draw_panels([*tasks], draw, path, title=title, inches=(6.0, 3.9))


def write_frontier(report: TaskReport, run_directory: RunDirectory) -> Path | None:
    """Write `plots/frontier.png` and return its path; None without any points."""
    points = frontier_points(report)
    if not points:
        return None
    first = [point for point in points if point.task == points[0].task]
    sign = -1 if lower_is_better(first[0].metric) else 1
    best = max(first, key=lambda point: (sign * point.value, -point.mean_steps))
    title = f"{best.task}: {best.reading} is best, with {best.mean_steps:.2f} steps on average"
    return plot_frontier(points, run_directory.plots / "frontier.png", title=title)
