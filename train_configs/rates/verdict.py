"""Verdicts on the sweeps of `rates.py`: each shape's best rate, and its loss at a shared rate.

    python -m train_configs.rates.verdict RECIPE      # rates, rates_muon or boundary

The shared rate has the lowest loss on average over all shapes. Losses are means over the seeds that
have every run of a table; the text names the other seeds and leaves them out. Verdicts are on the
grid of rates. The vertex of the parabola through a best rate and its neighbours, in log rate, is
printed beside it, because two seeds place a flat minimum only roughly. Where the best rate is the
smallest or the largest one tried, the optimum may lie outside: the text says so.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from titan_loop.analysis.results import ResultTable, RunResult
from titan_loop.errors import UserError
from titan_loop.evaluation.intervals import of_seeds
from titan_loop.tables import text_table

MOST_STEPS, MOST_BITS = 1, 0.01
"""Aims: steps of √2 between a best rate and the shared one, and bits per byte lost there."""
SEEDS = {"rates": 2, "rates_muon": 2, "boundary": 3}
"""Recipe → number of seeds that a verdict needs."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Losses of the rows of a table at its columns, which are learning rates apart by √2.

    Attributes:
        rates: Labels of the rates, in ascending order.
        runs: Number of runs of a complete seed.
        seeds: Seeds that have all of them.
        missing: Other seed → number of runs that it lacks.
        losses: Row → mean bits per byte over `seeds` at each rate; empty without a complete seed.
    """

    rates: Sequence[str]
    runs: int
    seeds: Sequence[int]
    missing: Mapping[int, int]
    losses: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, table: ResultTable, results: Sequence[RunResult]) -> "Sweep":
        """Return the losses of a table's complete seeds."""
        cells = {
            row: [table.values(results, row, rate) for rate in table.columns] for row in table.rows
        }
        every = [values for row in cells.values() for values in row]
        lacking = {
            seed: sum(seed not in values for values in every)
            for seed in sorted({seed for values in every for seed in values})
        }
        seeds = [seed for seed, lacks in lacking.items() if not lacks]
        return cls(
            rates=[*table.columns],
            runs=len(every),
            seeds=seeds,
            missing={seed: lacks for seed, lacks in lacking.items() if lacks},
            losses={
                row: [fmean(values[seed] for seed in seeds) for values in by_rate]
                for row, by_rate in cells.items()
                if seeds
            },
        )

    @property
    def shared(self) -> int:
        """Index of the rate with the lowest mean loss over the rows."""
        return _lowest([sum(losses) for losses in zip(*self.losses.values(), strict=True)])

    def best(self, row: str) -> int:
        """Return the index of a row's best rate."""
        return _lowest(self.losses[row])

    def is_at_edge(self, row: str) -> bool:
        """Return whether a row's best rate is the smallest or largest one tried."""
        return self.best(row) in (0, len(self.rates) - 1)

    def steps(self, row: str) -> int:
        """Return the distance from the shared rate to a row's best one, in steps of √2."""
        return self.best(row) - self.shared

    def excess(self, row: str) -> float:
        """Return a row's loss at the shared rate minus its lowest loss, in bits per byte."""
        return self.losses[row][self.shared] - self.losses[row][self.best(row)]

    def vertex(self, row: str) -> float | None:
        """Return the rate at the vertex of the parabola, None at an edge."""
        if self.is_at_edge(row):
            return None
        best = self.best(row)
        left, middle, right = self.losses[row][best - 1 : best + 2]
        steps = (left - right) / (left - 2 * middle + right) / 2
        return float(self.rates[best]) * math.sqrt(2) ** steps

    @property
    def worst(self) -> str:
        """Row that loses most at the shared rate."""
        return max(self.losses, key=self.excess)


def _lowest(losses: Sequence[float]) -> int:
    return losses.index(min(losses))


def worst_cells(table: ResultTable, results: Sequence[RunResult]) -> list[tuple[str, str]]:
    """Return stage and name of two cells: the worst row at the shared rate, and at its best.

    Without a complete seed the list is empty.
    """
    sweep = Sweep.of(table, results)
    if not sweep.seeds:
        return []
    places = (sweep.shared, sweep.best(sweep.worst))
    return [_cell(table, sweep.worst, sweep.rates[place]) for place in places]


def best_cells(table: ResultTable, results: Sequence[RunResult]) -> list[tuple[str, str]]:
    """Return stage and name of each row's best cell; without a complete seed the list is empty."""
    sweep = Sweep.of(table, results)
    return [_cell(table, row, sweep.rates[sweep.best(row)]) for row in sweep.losses]


def _cell(table: ResultTable, row: str, column: str) -> tuple[str, str]:
    where, name = table.address(row, column)
    return where["stage"], name


def rates_text(table: ResultTable, results: Sequence[RunResult], wanted: int) -> str:
    """Return best rates by row, and the verdicts on rate and loss.

    Args:
        wanted: Number of seeds that a verdict needs.
    """
    sweep = Sweep.of(table, results)
    seeds = _seeds_text(table, sweep, wanted)
    if not sweep.seeds:
        return seeds
    rate = sweep.rates[sweep.shared]
    rows = [
        [
            "shape",
            "best rate",
            f"steps from {rate}",
            "vertex",
            "lowest loss",
            f"loss at {rate}",
            "difference",
        ]
    ]
    for row, losses in sweep.losses.items():
        vertex = sweep.vertex(row)
        rows.append(
            [
                row,
                sweep.rates[sweep.best(row)] + " (edge)" * sweep.is_at_edge(row),
                f"{sweep.steps(row):+d}" if sweep.steps(row) else "0",
                f"{vertex:.1e}".replace("e-0", "e-") if vertex else "-",
                f"{min(losses):.3f}",
                f"{losses[sweep.shared]:.3f}",
                f"{sweep.excess(row):.3f}",
            ]
        )
    farthest = max(sweep.losses, key=lambda row: abs(sweep.steps(row)))
    distance = abs(sweep.steps(farthest))
    lost = sweep.excess(sweep.worst)
    places = [sweep.best(row) for row in sweep.losses]
    span = max(places) - min(places)
    doubt = _doubt(sweep, wanted)
    return "\n".join(
        [
            seeds,
            text_table(rows),
            f"Best rates: {_verdict(distance <= MOST_STEPS)}{doubt}. The largest distance from the "
            f"shared rate {rate} is {_steps(distance)} of √2, at {farthest} (aim: at most "
            f"{MOST_STEPS}); the lowest and the highest best rate are {_steps(span)} apart.",
            f"Loss at {rate}: {_verdict(lost <= MOST_BITS)}{doubt}. The largest difference from a "
            f"shape's best rate is {lost:.4f} bits per byte, at {sweep.worst} (aim: at most "
            f"{MOST_BITS}).",
        ]
    )


def boundary_text(table: ResultTable, results: Sequence[RunResult], wanted: int) -> str:
    """Return the verdict on the second row less the first, each at its best rate."""
    sweep = Sweep.of(table, results)
    seeds = _seeds_text(table, sweep, wanted)
    if not sweep.seeds:
        return seeds
    plain, other = sweep.losses
    rates = {row: sweep.rates[sweep.best(row)] for row in sweep.losses}
    before, after = (table.values(results, row, rates[row]) for row in (plain, other))
    mean, low, high = of_seeds([after[seed] - before[seed] for seed in sweep.seeds])
    interval = f" [{low:+.4f}, {high:+.4f}]" * (len(sweep.seeds) > 1)
    return (
        f"{seeds}\n{other} less {plain}: {_verdict(mean <= 0)}{_doubt(sweep, wanted)}. At their "
        f"best rates, {rates[other]} and {rates[plain]}, the difference is {mean:+.4f}{interval} "
        "bits per byte (aim: at most 0)."
    )


def _seeds_text(table: ResultTable, sweep: Sweep, wanted: int) -> str:
    numbers = ", ".join(map(str, sweep.seeds)) or "none complete"
    lacks = "".join(
        f"; seed {seed} is left out, it lacks {lacking} of {sweep.runs} runs"
        for seed, lacking in sweep.missing.items()
    )
    ending = "" if sweep.seeds else f"; no verdict, {wanted} seeds of {sweep.runs} runs are wanted"
    return f"{table.title}, seeds: {numbers}{lacks}{ending}"


def _doubt(sweep: Sweep, wanted: int) -> str:
    few = [f"on {len(sweep.seeds)} of {wanted} seeds"] * (len(sweep.seeds) < wanted)
    edges = [
        f"{row} is best at the edge of the grid" for row in sweep.losses if sweep.is_at_edge(row)
    ]
    return f" ({'; '.join([*few, *edges])})" if few or edges else ""


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "missed"


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def main() -> None:
    """Print the verdicts of a recipe's results."""
    from .recipes import TABLES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", choices=TABLES)
    recipe = parser.parse_args().recipe
    text = boundary_text if recipe == "boundary" else rates_text
    try:
        results = RunResult.all_of(Path(__file__).parent / "results" / recipe)
    except UserError as error:
        sys.exit(f"titan-loop: error: {error}")
    print("\n\n".join(text(table, results, SEEDS[recipe]) for table in TABLES[recipe]))


if __name__ == "__main__":
    main()
