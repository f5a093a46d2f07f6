"""Claims about one learning rate for all shapes, and the results that show them or do not."""

from collections.abc import Sequence

from titan_loop.analysis.results import RunResult

from ..claims import Cell, bits_claim
from .best_rates import best_cells, worst_cells


def _ruled_worst(results: Sequence[RunResult]) -> list[Cell]:
    from .recipes import TABLES  # imports torch

    _, ruled = TABLES["rates"]
    return [Cell(stage=stage, name=name) for stage, name in worst_cells(ruled, results)]


def _boundary_best(results: Sequence[RunResult]) -> list[Cell]:
    from .recipes import TABLES

    (table,) = TABLES["boundary"]
    plain_first = best_cells(table, results)
    return [Cell(stage=stage, name=name) for stage, name in reversed(plain_first)]


_RATES = "bash tools/rates.sh"

CLAIMS = [
    bits_claim(
        text="text: one learning rate for R = 1 to 8 and for D = 64 to 256, with the scaling "
        "rules: largest loss above a shape's own best",
        recipe="rates",
        cells=_ruled_worst,
        at_most=0.01,
        command=_RATES,
        note="arXiv 2606.18524 and 2203.03466; the worst of six shapes (mean of two seeds); seven "
        "rates, each √2 times the one before; each seed's own worst: 0.059, 0.039; 0.5M tokens; "
        "minutes of this shape at the two rates",
    ),
    bits_claim(
        text="text: the boundary operator at R = 4, minus the plain loop, equal FLOPs",
        recipe="boundary",
        cells=_boundary_best,
        at_most=0,
        command=f"{_RATES} --boundary",
        note="each at its best of four rates",
    ),
]
