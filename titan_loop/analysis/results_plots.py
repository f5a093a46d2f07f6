"""Plots of result tables: over their columns, over training steps, and against training FLOPs.

Bars are 95 % intervals over seeds. A hollow point has one or two seeds and no bar: by Student's t
two seeds have 3.6 times the bar of three with the same spread.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from titan_loop.analysis.drawing import COLORS, GREY, Axes, draw_axes, draw_panels, series_colors
from titan_loop.analysis.results import Estimate, ResultTable, RunResult
from titan_loop.evaluation.task_report import lower_is_better


def draw_table(table: ResultTable, results: Sequence[RunResult], path: Path) -> Path:
    """Draw the means: a line per row if columns are ordered, otherwise a panel per column."""
    columns, title = list(table.columns), conclusion(table, results)
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
    for row, color in _colors(table).items():
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


def conclusion(table: ResultTable, results: Sequence[RunResult], headline: str = "") -> str:
    """Return a plot's title: the table's `message`, or the best mean in its headline row or column.

    Args:
        headline: Row or column to use instead of `table.headline`.
    """

    def shown(match: re.Match[str]) -> str:
        mean = table.mean(results, match[1], match[2])
        return f"{mean[0].value:.{table.digits}f}" if mean else "–"

    if table.message:
        return re.sub(r"\{(.+?)\|(.+?)\}", shown, table.message)
    head = headline or table.headline or [*table.columns][-1]
    if head in table.rows:
        cells = {column: (head, column) for column in table.columns}
        lead = f"{head}: {table.columns_are} "
    else:
        cells = {row: (row, head) for row in table.rows}
        lead = f"{head} {table.columns_are}".strip() + ": "
    found = {name: mean for name, cell in cells.items() if (mean := table.mean(results, *cell))}
    if not found:
        return table.title
    order = min if lower_is_better(table.address(*next(iter(cells.values())))[1]) else max
    best = order(found, key=lambda name: found[name][0].value)
    interval, seeds = found[best]
    text = f"{lead}{best} is best, {interval.value:.{table.digits}f}"
    text += " %" * (table.factor == 100.0) + " on one seed" * (seeds == 1)
    level = [  # either interval contains the other's mean
        name
        for name, (mean, _) in found.items()
        if name != best
        and (mean.low <= interval.value <= mean.high or interval.low <= mean.value <= interval.high)
    ]
    names = ", ".join(level) if len(level) < 4 else f"{len(level)} others"
    return text + f"; intervals do not separate it from {names}" * bool(level)


def _colors(table: ResultTable) -> dict[str, str]:
    chosen = series_colors(table.in_color or [*table.rows])
    return {row: chosen.get(row, GREY) for row in table.rows}


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


def draw_curves(table: ResultTable, results: Sequence[RunResult], path: Path) -> Path:
    """Draw the columns in `over_training` against training steps: runs faint, row means strong."""

    def draw(axes: Axes, column: str) -> None:
        for row, color in _colors(table).items():
            values: dict[int, list[float]] = {}
            for curve in table.curves(results, row, column):
                axes.plot(*zip(*curve, strict=True), color=color, alpha=0.4, linewidth=0.8)
                for step, value in curve:
                    values.setdefault(step, []).append(value)
            axes.plot([*values], [*map(fmean, values.values())], color=color, label=row)
        axes.set_xlabel("training steps")

    columns, title = list(table.over_training), conclusion(table, results)
    return draw_panels(columns, draw, path, title=title, label=table.title, columns=2)


def draw_against_flops(table: ResultTable, results: Sequence[RunResult], path: Path) -> Path:
    """Draw each row's mean in the column `against_flops`, if its runs recorded their FLOPs."""
    column = table.against_flops

    def draw(axes: Axes) -> None:
        places: list[float] = []
        for row, color in _colors(table).items():
            costs = table.costs(results, row, column)
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

    return draw_axes(draw, path, title=conclusion(table, results, headline=column))
