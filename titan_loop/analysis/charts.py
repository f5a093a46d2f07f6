"""A chart of `metrics.jsonl` in `titan-loop plot` and `report`; families add their own."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Records = Sequence[Mapping[str, Any]]


class Chart(NamedTuple):
    """A plot of training metrics.

    Attributes:
        text: Caption below the heading.
        needs: Maps the names of all recorded metrics to whether there is something to draw.
        draw: Writes the PNG of the records at a path, and returns the path.
    """

    title: str
    text: str
    needs: Callable[[set[str]], bool]
    draw: Callable[[Records, Path], Path]
