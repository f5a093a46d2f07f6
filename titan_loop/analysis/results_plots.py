"""Plots of result tables: over their columns, and against training FLOPs.

Bars are 95 % intervals over seeds. A hollow point has one or two seeds and no bar: by Student's t
two seeds have 3.6 times the bar of three with the same spread.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from titan_loop.analysis.drawing import COLORS, Axes, draw_axes, draw_panels, series_colors
from titan_loop.analysis.results import Estimate, ResultTable, RunResult


def draw_table(table: ResultTable, results: Sequence[RunResult], path: Path) -> Path:
    """Draw the means: a line per row if columns are ordered, otherwise a panel per column."""
    columns, title = list(table.columns), _title(table, results)
    across = 3 if len(columns) % 4 else 4
    if table.columns_are:
        return draw_axes(lambda axes: _draw_lines(axes, table, results), path, title=title)

    rows = [row for row in table.rows if any(table.mean(results, row, c) for c in columns)]

    def draw(axes: Axes, column: str) -> None:
        for place, row in enumerate(rows):
            if mean := table.mean(results, row, column):
                _draw_means(axes, [(place, mean)], across=True, color=COLORS[0])
            if column in table.paper.get(row, {}):
                axes.plot(table.paper[row][column], place, "D", color=COLORS[1], markersize=5)
        axes.set_xlabel(table.title + "; diamonds: the paper" * bool(table.paper))
        named = columns.index(column) % across == 0
        axes.set_yticks(range(len(rows)), [row * named for row in rows])
        axes.invert_yaxis()
        axes.locator_params(axis="x", nbins=4)

    inches = 3.4, max(2.4, 0.22 * len(rows) + 0.8)
    return draw_panels(columns, draw, path, title=title, columns=across, inches=inches)


def _draw_lines(axes: Axes, table: ResultTable, results: Sequence[RunResult]) -> None:
    columns = list(table.columns)
    # A column stands at the number in its name; without a number in every name, at its index.
    numbers = [float(found[0]) for c in columns if (found := re.search(r"[\d.]+(e-?\d+)?", c))]
    places = numbers if len(numbers) == len(columns) else [*map(float, range(len(columns)))]
    at = dict(zip(columns, places, strict=True))
    for row, color in series_colors([*table.rows]).items():
        means = [(at[c], mean) for c in columns if (mean := table.mean(results, row, c))]
        if means:
            _draw_means(axes, means, color=color, label=row, linestyle="-")
        published = table.paper.get(row, {})
        axes.plot([at[c] for c in published], [*published.values()], "--", color=color)
    steps = np.diff(places) if len(places) > 2 else np.ones(1)
    if places[0] > 0 and steps.min() > 0 and steps.max() > 3 * steps.min():
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(places, columns)
    axes.set_xlabel(table.columns_are + "; dashed: the paper" * bool(table.paper))
    axes.set_ylabel(table.title)


def _title(table: ResultTable, results: Sequence[RunResult]) -> str:
    def shown(match: re.Match[str]) -> str:
        mean = table.mean(results, match[1], match[2])
        return f"{mean[0].value:.{table.digits}f}" if mean else "–"

    return re.sub(r"\{(.+?)\|(.+?)\}", shown, table.message or table.title)


def _draw_means(
    axes: Axes, means: Sequence[tuple[float, Estimate]], *, across: bool = False, **style: Any
) -> None:
    points = [(place, mean.value) for place, (mean, _) in means]
    bars = [
        (mean.value - mean.low, mean.high - mean.value) if seeds > 2 else (0.0, 0.0)
        for _, (mean, seeds) in means
    ]
    style = {"linestyle": "", "marker": "o", "elinewidth": 0.8, **style}
    style["xerr" if across else "yerr"] = [*zip(*bars, strict=True)]
    if any(seeds < 3 for _, (_, seeds) in means):
        style["markerfacecolor"] = "white"
    x, y = [*zip(*points, strict=True)][:: -1 if across else 1]
    axes.errorbar(x, y, **style)


def draw_against_flops(table: ResultTable, results: Sequence[RunResult], path: Path) -> Path:
    """Draw each row's mean in the column `against_flops`, if its runs recorded their FLOPs."""
    column = table.against_flops

    def draw(axes: Axes) -> None:
        places: list[float] = []
        for row, color in series_colors([*table.rows]).items():
            costs = [run.flops for run in table.runs(results, row, column)[1] if run.flops]
            mean = table.mean(results, row, column)
            if costs and mean:
                place = fmean(costs)
                while any(abs(place / other - 1.0) < 0.01 for other in places):
                    place *= 1.015  # beside it, or one bar hides the other
                places.append(place)
                _draw_means(axes, [(place, mean)], color=color, label=row)
        axes.set_xscale("log")
        axes.set_xlabel("training FLOPs (rows of equal cost stand side by side)")
        axes.set_ylabel(f"{table.title}, {column}")

    return draw_axes(draw, path, title=_title(table, results))
