"""Plots of the tables in `results`: over their columns, over training, and against its cost."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from titan_loop.analysis.drawing import draw_axes, draw_panels
from titan_loop.analysis.results import ResultTable, RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_table(table: ResultTable, results: Sequence[RunResult], path: Path) -> Path:
    """Draw a line a row over the columns, dashed where it is the paper's; write a PNG."""

    def draw(axes: "Axes") -> None:
        columns = list(table.columns)
        places = range(len(columns))
        for index, row in enumerate(table.rows):
            color = f"C{index}"
            cells = [table.values(results, row, column) for column in columns]
            own = [(place, fmean(cell)) for place, cell in zip(places, cells, strict=True) if cell]
            if own:
                axes.plot(*zip(*own, strict=True), color=color, marker="o", label=row)
            told = table.paper.get(row, {})
            paper = [(columns.index(column), value) for column, value in told.items()]
            if paper:
                axes.plot(
                    *zip(*paper, strict=True), color=color, linestyle="--", label=f"{row}, paper"
                )
        axes.set_title(table.title)
        axes.set_xticks(list(places), columns)
        axes.set_xlabel(table.columns_are)
        axes.figure.legend(loc="outside right upper")

    return draw_axes(draw, path)


def draw_curves(table: ResultTable, results: Sequence[RunResult], path: Path) -> Path:
    """Draw the columns of `over_training` over the steps of training, a line a row and run."""

    def draw(axes: "Axes", column: str) -> None:
        for index, row in enumerate(table.rows):
            for run, curve in enumerate(table.curves(results, row, column)):
                label = row if run == 0 else None
                axes.plot(*zip(*curve, strict=True), color=f"C{index}", label=label)
        axes.set_xlabel("training steps")

    columns = list(table.over_training)
    return draw_panels(columns, draw, path, title=table.title, columns=2, legend=True)


def draw_against_flops(table: ResultTable, results: Sequence[RunResult], path: Path) -> Path:
    """Draw a point a row: mean over seeds of the column `against_flops`, at the FLOPs it cost.

    A bar spans the seeds. Rows without a recorded cost are left out.
    """

    def draw(axes: "Axes") -> None:
        for index, row in enumerate(table.rows):
            column = table.against_flops
            values = table.values(results, row, column)
            costs = table.costs(results, row, column)
            if costs:
                mean = fmean(values)
                spread = [[mean - min(values)], [max(values) - mean]]
                marker = "osD^v"[index // 10 % 5]
                axes.errorbar(
                    fmean(costs), mean, yerr=spread, marker=marker, linestyle="", label=row
                )
        axes.set_xscale("log")
        axes.set_xlabel("training FLOPs")
        axes.set_ylabel(f"{table.title}, {table.against_flops}")
        axes.figure.legend(loc="outside right upper")

    return draw_axes(draw, path)
