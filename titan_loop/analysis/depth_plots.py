"""A plot of results on held-out text and tasks against recurrent steps, as PNG."""

from collections.abc import Mapping
from pathlib import Path

from titan_loop.analysis.drawing import COLORS, Axes, draw_panels, series_colors
from titan_loop.analysis.plots import best_depth
from titan_loop.evaluation.bits_per_byte import paired_difference
from titan_loop.evaluation.task_report import (
    ReadingResult,
    TaskReport,
    headline,
    interval,
    lower_is_better,
    unit_numbers,
)
from titan_loop.runs.run_directory import RunDirectory

Depths = Mapping[int, ReadingResult]


def swept_tasks(report: TaskReport) -> dict[str, Depths]:
    """Return task → recurrent steps → result, of every task read at more than one static depth."""
    found = {task: _by_depth(readings) for task, readings in report.tasks.items()}
    return {task: depths for task, depths in found.items() if len(depths) > 1}


def plot_depths(
    report: TaskReport,
    path: Path,
    others: Mapping[str, TaskReport] | None = None,
    mine: str | None = None,
) -> Path:
    """Draw the headline metric of each task read at several depths, one panel per task.

    Bars are 95 % intervals: on held-out text of the change from the smallest depth, over documents,
    which are the same at all depths; of the metric itself elsewhere.

    Args:
        others: Name → report of runs to compare with; one of a single depth is a dashed line.
        mine: Name of the report's own run beside others.
    """
    others = others or {}
    colors = series_colors(["", *others])
    swept = swept_tasks(report)

    def draw(axes: Axes, task: str) -> None:
        depths = swept[task]
        metric = _metric(depths)
        values = [result.metrics[metric] for result in depths.values()]
        bars = _bars(depths, metric)
        style = {"color": COLORS[0], "marker": "o", "markersize": 5, "capsize": 4, "label": mine}
        axes.errorbar([*depths], values, yerr=bars, **style)
        for other, theirs in others.items():
            found = _by_depth(theirs.tasks.get(task, {}))
            numbers = [result.metrics.get(metric, float("nan")) for result in found.values()]
            if len(found) == 1:
                axes.axhline(numbers[0], linestyle="--", color=colors[other], label=other)
            elif found:
                axes.plot([*found], numbers, marker="o", color=colors[other], label=other)
        axes.axvline(report.trained_recurrent_steps, color="0.8", linewidth=6, alpha=0.5, zorder=0)
        axes.set_xticks([*depths])
        axes.set_xlabel("recurrent steps R")
        better = "lower" if lower_is_better(metric) else "higher"
        axes.set_ylabel(f"{metric} ({better} is better)")
        axes.margins(y=0.08)

    best = best_depth([_best(depths) for depths in swept.values()])
    name, trained = f"{mine}: " if mine else "", report.trained_recurrent_steps
    title = f"{name}{best} at step {report.step:,}; grey: the trained R = {trained}"
    return draw_panels([*swept], draw, path, title=title, columns=4, inches=(3.6, 3.9))


def compare_depths(runs: Mapping[str, RunDirectory], path: Path) -> Path | None:
    """Draw the newest reports of named runs; None unless at least two of them were evaluated.

    The first one that was read at the most depths has the bars.
    """
    reports = {name: found[-1] for name, run in runs.items() if (found := TaskReport.all_of(run))}

    def most_depths(name: str) -> int:
        return max((len(depths) for depths in swept_tasks(reports[name]).values()), default=0)

    if len(reports) < 2 or not most_depths(most := max(reports, key=most_depths)):
        return None
    return plot_depths(reports.pop(most), path, reports, most)


def _by_depth(readings: Mapping[str, ReadingResult]) -> Depths:
    found = {
        int(name.removeprefix("static:")): result
        for name, result in readings.items()
        if name.startswith("static:") and result.metrics
    }
    return dict(sorted(found.items()))


def _metric(depths: Depths) -> str:
    return headline(next(iter(depths.values())).metrics)


def _bars(depths: Depths, metric: str) -> tuple[list[float], list[float]]:
    """Return the lengths of the bars below and above the points."""
    results = [*depths.values()]
    found = [interval(result.metrics, metric) for result in results]
    if all(result.units for result in results):
        sums = [unit_numbers(result.units) for result in results]
        first_bytes, first = sums[0]
        if all(n_bytes == first_bytes for n_bytes, _ in sums):  # else of samples of two sizes
            found = [paired_difference(nats, first, first_bytes) for _, nats in sums]
    below = [max(each.value - each.low, 0.0) for each in found]
    return below, [max(each.high - each.value, 0.0) for each in found]


def _best(depths: Depths) -> int:
    metric = _metric(depths)
    better = min if lower_is_better(metric) else max
    return better(depths, key=lambda depth: depths[depth].metrics[metric])
