"""Plots of result tables: over their columns, over training steps, and against training FLOPs."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from titan_loop.analysis.drawing import Axes, draw_axes, draw_panels
from titan_loop.analysis.results import ResultTable, RunResult
from titan_loop.evaluation.intervals import Interval


def draw_table(table: ResultTable, results: Sequence[RunResult], path: Path) -> Path:
    """Draw one line per row over the columns, with 95 % intervals over seeds; papers are dashed."""

    def draw(axes: Axes) -> None:
        columns = list(table.columns)
        for index, row in enumerate(table.rows):
            color = f"C{index}"
            cells = [table.mean(results, row, column) for column in columns]
            means = [(at, cell[0]) for at, cell in enumerate(cells) if cell]
            if means:
                _draw_means(axes, means, color=color, marker="o", label=row)
            told = table.paper.get(row, {})
            paper = [(columns.index(column), value) for column, value in told.items()]
            if paper:
                axes.plot(
                    *zip(*paper, strict=True), color=color, linestyle="--", label=f"{row}, paper"
                )
        axes.set_title(table.title)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_xlabel(table.columns_are)
        axes.figure.legend(loc="outside right upper")

    return draw_axes(draw, path)


def _draw_means(axes: Axes, means: Sequence[tuple[float, Interval]], **style: Any) -> None:
    bars = [(mean.value - mean.low, mean.high - mean.value) for _, mean in means]
    axes.errorbar(
        [place for place, _ in means],
        [mean.value for _, mean in means],
        yerr=[*zip(*bars, strict=True)],
        elinewidth=0.8,
        **style,
    )


def draw_curves(table: ResultTable, results: Sequence[RunResult], path: Path) -> Path:
    """Draw the columns of `over_training` over the training steps, one line per row and run."""

    def draw(axes: Axes, column: str) -> None:
        for index, row in enumerate(table.rows):
            for run, curve in enumerate(table.curves(results, row, column)):
                label = row if run == 0 else None
                axes.plot(*zip(*curve, strict=True), color=f"C{index}", label=label)
        axes.set_xlabel("training steps")

    columns = list(table.over_training)
    return draw_panels(columns, draw, path, title=table.title, columns=2, legend=True)


def draw_against_flops(table: ResultTable, results: Sequence[RunResult], path: Path) -> Path:
    """Draw one point per row with a recorded cost: mean and 95 % interval of `against_flops`."""

    def draw(axes: Axes) -> None:
        for index, row in enumerate(table.rows):
            column = table.against_flops
            costs = table.costs(results, row, column)
            mean = table.mean(results, row, column)
            if costs and mean:
                marker = "osD^v"[index // 10 % 5]
                at = [(fmean(costs), mean[0])]
                _draw_means(axes, at, marker=marker, linestyle="", label=row)
        axes.set_xscale("log")
        axes.set_xlabel("training FLOPs")
        axes.set_ylabel(f"{table.title}, {table.against_flops}")
        axes.figure.legend(loc="outside right upper")

    return draw_axes(draw, path)
