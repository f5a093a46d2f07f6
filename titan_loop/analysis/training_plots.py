"""PNG plots for the report: exit entropy, realised mixture, throughput, and tasks by depth."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_loop.analysis.drawing import (
    draw_axes,
    only_marker,
    plain,
    pyplot,
    save_figure,
    series,
    smoothed,
    token_axis,
)
from titan_loop.data.load.loader import named_sources
from titan_loop.data.load.mixture import parse_mixture
from titan_loop.evaluation.task_report import ReadingResult, TaskReport, headline, lower_is_better

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SOURCE_COLORS = "tab10"


def plot_entropy(records: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw the mean entropy of the exit distribution, below that of a uniform one.

    Args:
        records: Of `metrics.jsonl`.
        path: Where the PNG goes.
    """

    def draw(axes: "Axes") -> None:
        tokens, entropy = series(records, "tokens"), series(records, "exit/entropy_nats")
        axes.plot(tokens, entropy, color="#1f4e79", alpha=0.25, linewidth=0.8)
        axes.plot(
            tokens,
            smoothed(entropy),
            color="#1f4e79",
            label="exit distribution",
            marker=only_marker(tokens),
        )
        bound = np.log(series(records, "recurrent_steps"))
        axes.plot(tokens, bound, color="0.4", linestyle="--", label="uniform over R steps")
        top = np.nanmax(bound) if np.isfinite(bound).any() else math.nan
        axes.set_ylim(0, max(1.08 * top, 0.1) if math.isfinite(top) else None)
        axes.set_title("Entropy of the exit distribution")
        axes.set_ylabel("entropy (nats)")
        axes.legend(frameon=False, loc="lower right")
        token_axis(axes, tokens)

    return draw_axes(draw, path)


def plot_mixture(records: Sequence[Mapping[str, Any]], mixture: Sequence[str], path: Path) -> Path:
    """Draw each source's share of the tokens read so far, and dashed the share asked for.

    Args:
        records: Of `metrics.jsonl`.
        mixture: The config's `dataloader.mixture`; weights of sources that are not in it are not
            drawn.
        path: Where the PNG goes.
    """
    suffix = "/tokens"
    keys = {key for record in records for key in record if key.startswith("data/")}
    names = sorted(key[len("data/") : -len(suffix)] for key in keys if key.endswith(suffix))
    asked = _asked_shares(mixture)

    def draw(axes: "Axes") -> None:
        import matplotlib as mpl

        tokens = series(records, "tokens")
        read = np.array([np.nan_to_num(series(records, f"data/{n}{suffix}")) for n in names])
        total = np.maximum(read.sum(axis=0), 1)
        for index, name in enumerate(names):
            color = mpl.colormaps[_SOURCE_COLORS](index % 10)
            share = read[index] / total
            axes.plot(tokens, share, color=color, label=name, marker=only_marker(tokens))
            if name in asked:
                axes.axhline(asked[name], color=color, linestyle="--", linewidth=1.0, alpha=0.7)
        axes.set_ylim(0, 1.02)
        axes.set_title("Share of each source in the tokens read so far")
        axes.set_ylabel("share")
        axes.figure.legend(loc="outside right upper", frameon=False)
        token_axis(axes, tokens)

    return draw_axes(draw, path)


def _asked_shares(mixture: Sequence[str]) -> dict[str, float]:
    if not mixture:
        return {}
    entries = parse_mixture(mixture)
    total = sum(entry.weight for entry in entries)
    names = named_sources([entry.path for entry in entries])
    return {name: e.weight / total for name, e in zip(names, entries, strict=True)}


def plot_throughput(records: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw tokens per second, and below it the share of the time spent waiting for data.

    Args:
        records: Of `metrics.jsonl`.
        path: Where the PNG goes.
    """
    tokens = series(records, "tokens")
    figure, (speed_axes, wait_axes) = pyplot().subplots(
        2, 1, figsize=(8.0, 5.4), layout="constrained", height_ratios=(3, 1), sharex=True
    )
    speed = series(records, "tokens_per_second")
    speed_axes.plot(tokens, speed, color="#1f4e79", alpha=0.25, linewidth=0.8)
    speed_axes.plot(tokens, smoothed(speed), color="#1f4e79", marker=only_marker(tokens))
    speed_axes.set_ylim(bottom=0)
    speed_axes.set_title("Throughput, all ranks together")
    speed_axes.set_ylabel("tokens per second")
    waiting = series(records, "data_wait")
    wait_axes.plot(tokens, waiting, color="#d1495b", marker=only_marker(tokens))
    wait_axes.set_ylim(0, 1)
    wait_axes.set_ylabel("waiting for data")
    for axes in (speed_axes, wait_axes):
        plain(axes)
    token_axis(wait_axes, tokens)
    return save_figure(figure, path)


def plot_task_depths(report: TaskReport, path: Path) -> Path:
    """Draw each task's headline metric against static depth, one panel a task.

    Args:
        report: With at least one task that was read at several depths.
        path: Where the PNG goes.
    """
    swept = {
        task: dict(sorted(depths.items()))
        for task, readings in report.tasks.items()
        if len(depths := _by_depth(readings)) > 1
    }
    columns = min(len(swept), 3)
    rows = -(-len(swept) // columns)
    figure, grid = pyplot().subplots(
        rows,
        columns,
        figsize=(max(8.0, 4.2 * columns), 3.6 * rows + 0.5),
        layout="constrained",
        squeeze=False,
    )
    for axes, (task, depths) in zip(grid.flat, swept.items(), strict=False):
        metric = headline(next(iter(depths.values())).metrics)
        values = [result.metrics.get(metric, math.nan) for result in depths.values()]
        errors = np.array([_error(result.metrics, metric) for result in depths.values()]).T
        axes.errorbar(
            list(depths), values, yerr=errors, color="#1f4e79", marker="o", markersize=5, capsize=4
        )
        axes.axvline(report.trained_recurrent_steps, color="0.8", linewidth=6, alpha=0.5, zorder=0)
        axes.set_xticks(list(depths))
        axes.set_xlabel("recurrent steps R")
        better = "lower" if lower_is_better(metric) else "higher"
        axes.set_ylabel(f"{metric} ({better} is better)")
        axes.set_title(task)
        plain(axes)
    for axes in list(grid.flat)[len(swept) :]:
        axes.set_visible(False)
    figure.suptitle(
        f"Tasks by depth at step {report.step:,}; grey: the trained R = "
        f"{report.trained_recurrent_steps}; bars: standard errors, of bits per byte 95 % intervals"
    )
    return save_figure(figure, path)


def _error(metrics: Mapping[str, float], metric: str) -> tuple[float, float]:
    """Return how far a bar goes down and up."""
    if f"{metric}_low" in metrics:
        return metrics[metric] - metrics[f"{metric}_low"], metrics[f"{metric}_high"] - metrics[
            metric
        ]
    name, _, kind = metric.partition(",")
    error = metrics.get(f"{name}_stderr,{kind}", 0.0)
    return error, error


def _by_depth(readings: Mapping[str, ReadingResult]) -> dict[int, ReadingResult]:
    return {
        int(name.removeprefix("static:")): result
        for name, result in readings.items()
        if name.startswith("static:") and result.metrics
    }
