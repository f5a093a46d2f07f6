"""Claims about the loops that shipped, and the results that show them or do not."""

from collections.abc import Sequence
from functools import partial

from titan_loop.analysis.results import RunResult

from ..claims import Cell, Claim


def _cells(task: str, arms: tuple[str, str], _: Sequence[RunResult]) -> list[Cell]:
    from .recipes import TABLES  # imports torch

    (table,) = (each for each in TABLES["shipped_loops"] if each.name == task)
    found = (table.address(arm, list(table.columns)[-1]) for arm in arms)
    return [Cell(stage=where["stage"], name=name) for where, name in found]


_PAIRS = [
    (
        "messages",
        "alone",
        "passes that read the pass before by messages, minus one pass",
        (0, 0),
        "1.5 to 1.6 times the FLOPs; without messages the second pass would repeat the first",
    ),
    (
        "loopcoder",
        "loop",
        "two loops that share the first one's keys and values, minus a plain loop",
        (0.01, -2),
        "1.04 to 1.06 times the FLOPs",
    ),
    (
        "messages",
        "loop",
        "passes that start again with messages, minus a plain loop",
        (0, 0),
        "0.85 to 0.9 times the FLOPs; Inkling's block against Llama's",
    ),
    (
        "loop",
        "dense",
        "a plain loop, minus four layers",
        (0, 0),
        "equal FLOPs, half as many layers",
    ),
]
_SMALL = "each at its best of four rates; {} steps of 512 tokens; aims set during the runs"

CLAIMS = [
    Claim(
        paper="–",
        text=f"{task}: {text}",
        theirs="",
        recipe="shipped_loops",
        cells=partial(_cells, task, (arm, other)),
        at_most=bounds[0] if task == "text" else None,
        at_least=bounds[1] if task == "mano" else None,
        factor=factor,
        unit=unit,
        command="bash tools/shipped_loops.sh",
        note=f"{note}; {_SMALL.format(steps)}",
    )
    for task, factor, unit, steps in (
        ("text", 1.0, "bits per byte", 200),
        ("mano", 100.0, "points", 150),
    )
    for arm, other, text, bounds, note in _PAIRS
]
