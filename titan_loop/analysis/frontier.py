"""Quality against the average number of recurrent steps: every exit policy beside static depth.

A `TaskReport` with the frontier's readings ─► points ─► table, CSV, PNG
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from titan_loop.analysis.drawing import draw_panels
from titan_loop.evaluation.task_report import TaskReport, headline, lower_is_better
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.tables import text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TITLES = {
    "static": "static depth",
    "q": "Q-exit (gate)",
    "hidden": "hidden-state difference",
    "relative": "relative difference",
    "confidence": "confidence",
    "kl": "KL and entropy",
}
_STYLES = {
    "static": ("#222222", "o", "-"),
    "q": ("#1f4e79", "s", "-"),
    "hidden": ("#d1495b", "^", "--"),
    "relative": ("#d1495b", "v", ":"),
    "confidence": ("#8a5fbf", "P", "-."),
    "kl": ("#2a9d5c", "D", ":"),
}


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
            if result.mean_steps is None or not result.metrics:
                continue
            metric = headline(result.metrics)
            points.append(
                FrontierPoint(
                    task,
                    metric,
                    name.partition(":")[0],
                    name,
                    result.mean_steps,
                    result.metrics[metric],
                )
            )
    order = list(_STYLES)
    return sorted(points, key=lambda p: (p.task, _place(p.policy, order), p.mean_steps))


def _place(policy: str, order: list[str]) -> tuple[int, str]:
    """Sort policies as listed, then plug-ins' policies by name."""
    return (order.index(policy) if policy in order else len(order), policy)


def frontier_table(points: Sequence[FrontierPoint]) -> str:
    """Return the points as aligned text."""
    rows = [["task", "reading", "mean steps", "value", "metric"]]
    rows += [[p.task, p.reading, f"{p.mean_steps:.2f}", f"{p.value:.4f}", p.metric] for p in points]
    return text_table(rows, left=(0, 1, 4))


def frontier_csv(points: Sequence[FrontierPoint]) -> str:
    """Return the points as CSV with a header."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(FrontierPoint._fields)
    writer.writerows(points)
    return buffer.getvalue()


def plot_frontier(points: Sequence[FrontierPoint], path: Path, *, title: str) -> Path:
    """Draw one panel per task: the metric against mean steps, a line for each policy."""

    def draw(axes: "Axes", task: str) -> None:
        mine = [point for point in points if point.task == task]
        for policy in dict.fromkeys(point.policy for point in mine):
            color, marker, line = _STYLES.get(policy, ("#8c8c8c", "x", "--"))
            line_points = [point for point in mine if point.policy == policy]
            axes.plot(
                [point.mean_steps for point in line_points],
                [point.value for point in line_points],
                color=color,
                marker=marker,
                linestyle=line,
                markersize=4,
                linewidth=1.4,
                label=_TITLES.get(policy, policy),
            )
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
    path.write_text(frontier_csv(points), encoding="utf-8")
    png = plot_frontier(
        points,
        run_directory.plots / "frontier.png",
        title=f"Quality against compute at step {report.step:,}",
    )
    return WrittenFrontier(points, path, png)
