"""Quality against the average number of recurrent steps: every exit policy beside static depth.

A `TaskReport` with the frontier's readings ─► points ─► table, CSV, PNG
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from titan_loop.analysis.drawing import draw_panels
from titan_loop.evaluation.task_report import TaskReport, headline, lower_is_better
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.tables import text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = {
    "static": ("static depth", "#222222", "o-"),
    "q": ("Q-exit (gate)", "#1f4e79", "s-"),
    "hidden": ("hidden-state difference", "#d1495b", "^--"),
    "relative": ("relative difference", "#d1495b", "v:"),
    "confidence": ("confidence", "#8a5fbf", "P-."),
    "kl": ("KL and entropy", "#2a9d5c", "D:"),
}
"""Title, colour and line of each policy; plug-ins' policies come after them."""


class FrontierPoint(NamedTuple):
    """One reading of one task."""

    task: str
    metric: str
    policy: str
    reading: str
    mean_steps: float
    value: float


def frontier_points(report: TaskReport) -> list[FrontierPoint]:
    """Return the points of every task that was read by more than static depth, by mean steps."""
    points = []
    for task, readings in report.tasks.items():
        if len({name.partition(":")[0] for name in readings}) < 2:
            continue
        for name, result in readings.items():
            if result.mean_steps is not None and result.metrics:
                metric, policy = headline(result.metrics), name.partition(":")[0]
                value = result.metrics[metric]
                points.append(FrontierPoint(task, metric, policy, name, result.mean_steps, value))
    order = [*_STYLES, *sorted({point.policy for point in points} - _STYLES.keys())]
    return sorted(points, key=lambda p: (p.task, order.index(p.policy), p.mean_steps))


def frontier_table(points: Sequence[FrontierPoint]) -> str:
    """Return the points as aligned text."""
    rows = [["task", "reading", "mean steps", "value", "metric"]]
    rows += [[p.task, p.reading, f"{p.mean_steps:.2f}", f"{p.value:.4f}", p.metric] for p in points]
    return text_table(rows, left=(0, 1, 4))


def plot_frontier(points: Sequence[FrontierPoint], path: Path, *, title: str) -> Path:
    """Draw one panel per task: the metric against mean steps, a line for each policy."""

    def draw(axes: "Axes", task: str) -> None:
        mine = [point for point in points if point.task == task]
        for policy in dict.fromkeys(point.policy for point in mine):
            label, color, line = _STYLES.get(policy, (policy, "#8c8c8c", "x--"))
            at = [(point.mean_steps, point.value) for point in mine if point.policy == policy]
            axes.plot(*zip(*at, strict=True), line, color=color, markersize=4, label=label)
        better = "lower" if lower_is_better(mine[0].metric) else "higher"
        axes.set_ylabel(f"{mine[0].metric} ({better} is better)")
        axes.set_xlabel("mean recurrent steps per token")

    tasks = list(dict.fromkeys(point.task for point in points))
    return draw_panels(tasks, draw, path, title=title, legend=True)


class WrittenFrontier(NamedTuple):
    """Points and the files they were written to."""

    points: list[FrontierPoint]
    csv: Path
    png: Path


def write_frontier(report: TaskReport, run_directory: RunDirectory) -> WrittenFrontier | None:
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
    title = f"Quality against compute at step {report.step:,}"
    png = plot_frontier(points, run_directory.plots / "frontier.png", title=title)
    return WrittenFrontier(points, path, png)
