"""A claim of a paper, and the committed results that show it or do not.

The claims stand in NAME/claims.py; `python -m tools.reproduce` makes REPRODUCE.md of them. A claim
is one number: a cell of the results, or made of two or three. Aims were set before the experiments
ran, unless a note says otherwise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from titan_loop.analysis.results import RunResult


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A number of a stage's results.

    Attributes:
        stage: Stage of the recipe.
        name: TASK/METRIC/READING in the results' files.
    """

    stage: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim.

    Attributes:
        paper: "003", the paper's number in the notes, or "–" for one of our own.
        text: The claim in words.
        theirs: The paper's number, as text; empty if it has none.
        recipe: Recipe whose results are read.
        cells: The number; or two, the first less the second, paired by seed; or three, the share of
            the way from the first to the third that the second goes. A function chooses them by
            the results, and returns none while runs are missing.
        at_least: Smallest number that shows the claim, in the claim's unit.
        at_most: Largest number that shows it.
        factor: Unit: 100 for per cent and points, 1 for bits.
        unit: Its name.
        command: Command that makes the results.
        note: Deviation that a reader must know.
        is_test: False if the number says nothing of the claim; there is no verdict then.
    """

    paper: str = "–"
    text: str
    theirs: str = ""
    recipe: str
    cells: Sequence[Cell] | Callable[[Sequence[RunResult]], Sequence[Cell]]
    at_least: float | None = None
    at_most: float | None = None
    factor: float = 100.0
    unit: str = "%"
    command: str
    note: str = ""
    is_test: bool = True


bits_claim = partial(Claim, factor=1.0, unit="bits per byte")
"""Makes a claim in bits per byte."""


def text_cell(stage: str, steps: int) -> Cell:
    """Return the bits per byte of held-out text at R = `steps`."""
    return Cell(stage=stage, name=f"held_out/all/bits_per_byte/static:{steps}")


def mano_cell(stage: str, steps: int, task: str = "mano") -> Cell:
    """Return the share of right answers of an arithmetic task at R = `steps`."""
    return Cell(stage=stage, name=f"{task}/acc,none/static:{steps}")
