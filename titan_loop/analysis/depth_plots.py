"""Plots of a checkpoint's results on held-out text and tasks against recurrent steps, as PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from titan_loop.analysis.drawing import (
    COLORS,
    Axes,
    draw_panels,
    mark_trained_depth,
    series_colors,
)
from titan_loop.analysis.plots import best_depth
from titan_loop.evaluation.depth_report import DepthReport
from titan_loop.evaluation.task_report import (
    ReadingResult,
    TaskReport,
    headline,
    interval,
    lower_is_better,
)
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.tables import short

_POINTS = {"color": COLORS[0], "marker": "o", "markersize": 5, "capsize": 4}


def plot_depths(
    report: DepthReport,
    path: Path,
    others: Mapping[str, DepthReport] | None = None,
    mine: str | None = None,
) -> Path:
    """Draw bits per byte against depth, one panel per source.

    Bars are 95 % bootstrap intervals of the change from the smallest depth, over documents, which
    are the same at all depths.

    Args:
        others: Name → report of runs to compare with; one of a single depth is a dashed line.
        mine: Name of the report's own run beside others.
    """
    others = others or {}
    colors = series_colors(["", *others])

    def draw(axes: Axes, name: str) -> None:
        source = report.sources[name]
        depths = sorted(source.depths)
        change_R, low_R, high_R = np.array([source.changes[depth] for depth in depths]).T
        bars = np.maximum([change_R - low_R, high_R - change_R], 0)  # none may be negative
        values = source.depths[depths[0]].value + change_R
        axes.errorbar(depths, values, yerr=bars, label=mine, **_POINTS)
        for other, theirs in others.items():
            if name not in theirs.sources:
                continue
            found = sorted(theirs.sources[name].depths.items())
            values = [at.value for _, at in found]
            if len(found) == 1:
                axes.axhline(values[0], linestyle="--", color=colors[other], label=other)
            else:
                steps = [steps for steps, _ in found]
                axes.plot(steps, values, marker="o", color=colors[other], label=other)
        mark_trained_depth(axes, depths, report.trained_recurrent_steps)
        axes.set_title(f"{name} ({source.n_bytes / 1000:,.0f} kB)")
        axes.margins(y=0.08)

    depths = [source.depths for source in report.sources.values()]
    best = best_depth([min(at, key=at.__getitem__) for at in depths])
    title = f"{best} after {short(report.tokens)} tokens; {_trained(report)}"
    label = "bits per byte (lower is better)"
    return draw_panels(list(report.sources), draw, path, title=title, label=label, columns=4)


def compare_depths(runs: Sequence[RunDirectory], path: Path) -> Path | None:
    """Draw bits per byte of several runs; None unless at least two of them were scored.

    The first one that was scored at several depths has the bars.
    """
    reports = {
        run.path.resolve().name: DepthReport.latest(run)
        for run in runs
        if any(run.evaluations.glob("depth-step-*.json"))
    }
    if len(reports) < 2:
        return None
    most = max(reports, key=lambda name: len(next(iter(reports[name].sources.values())).depths))
    return plot_depths(reports.pop(most), path, reports, most)


def plot_task_depths(report: TaskReport, path: Path) -> Path:
    """Draw the headline metric of each task read at several static depths, one panel per task."""
    swept = {
        task: dict(sorted(depths.items()))
        for task, readings in report.tasks.items()
        if len(depths := _by_depth(readings)) > 1
    }

    def draw(axes: Axes, task: str) -> None:
        depths = swept[task]
        metric = headline(next(iter(depths.values())).metrics)
        found = [interval(result.metrics, metric) for result in depths.values()]
        bars = [(each.value - each.low, each.high - each.value) for each in found]
        values = [each.value for each in found]
        axes.errorbar(list(depths), values, yerr=[*zip(*bars, strict=True)], **_POINTS)
        mark_trained_depth(axes, list(depths), report.trained_recurrent_steps)
        better = "lower" if lower_is_better(metric) else "higher"
        axes.set_ylabel(f"{metric} ({better} is better)")

    best = best_depth([_best(depths) for depths in swept.values()])
    title = f"{best} at step {report.step:,}; {_trained(report)}; bars: 95 % intervals"
    return draw_panels(list(swept), draw, path, title=title)


def _trained(report: DepthReport | TaskReport) -> str:
    return f"grey: the trained R = {report.trained_recurrent_steps}"


def _best(depths: Mapping[int, ReadingResult]) -> int:
    metric = headline(next(iter(depths.values())).metrics)
    better = min if lower_is_better(metric) else max
    return better(depths, key=lambda depth: depths[depth].metrics[metric])


def _by_depth(readings: Mapping[str, ReadingResult]) -> dict[int, ReadingResult]:
    return {
        int(name.removeprefix("static:")): result
        for name, result in readings.items()
        if name.startswith("static:") and result.metrics
    }
