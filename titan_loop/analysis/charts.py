"""Charts of `metrics.jsonl` that families add to `titan-loop plot` and `report`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from titan_loop.plugins import find, names

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


def family_charts(records: Records) -> dict[str, Chart]:
    """Return the registered charts that have something to draw, by name."""
    keys = {key for record in records for key in record}
    charts = {name: find("charts", name) for name in names("charts")}
    return {name: chart for name, chart in charts.items() if chart.needs(keys)}
