"""The rate that a sweep's shapes share, and the best of each: the cells that claims compare.

The shared rate has the lowest loss on average over all shapes. Losses are means over the seeds that
have every run of a table; the others are left out. All is on the grid of rates.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from titan_loop.analysis.results import ResultTable, RunResult


def worst_cells(table: ResultTable, results: Sequence[RunResult]) -> list[tuple[str, str]]:
    """Return stage and name of two cells: the row that loses most at the shared rate, and its best.

    Without a complete seed the list is empty.
    """
    losses = _losses(table, results)
    if not losses:
        return []
    shared = _lowest([sum(by_rate) for by_rate in zip(*losses.values(), strict=True)])
    worst = max(losses, key=lambda row: losses[row][shared] - min(losses[row]))
    return [_cell(table, worst, place) for place in (shared, _lowest(losses[worst]))]


def best_cells(table: ResultTable, results: Sequence[RunResult]) -> list[tuple[str, str]]:
    """Return stage and name of each row's best cell; without a complete seed the list is empty."""
    return [_cell(table, row, _lowest(by_rate)) for row, by_rate in _losses(table, results).items()]


def _losses(table: ResultTable, results: Sequence[RunResult]) -> Mapping[str, Sequence[float]]:
    """Return each row's mean losses at all rates over the complete seeds, if there are any."""
    cells = {
        row: [table.values(results, row, rate) for rate in table.columns] for row in table.rows
    }
    every = [values for by_rate in cells.values() for values in by_rate]
    seeds = set[int].intersection(*map(set, every))
    return {
        row: [fmean(values[seed] for seed in sorted(seeds)) for values in by_rate]
        for row, by_rate in cells.items()
        if seeds
    }


def _lowest(losses: Sequence[float]) -> int:
    return losses.index(min(losses))


def _cell(table: ResultTable, row: str, place: int) -> tuple[str, str]:
    where, name = table.address(row, list(table.columns)[place])
    return where["stage"], name
