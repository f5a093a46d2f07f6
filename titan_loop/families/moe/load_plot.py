"""The plot of experts' loads over training: the busiest and the idlest of each layer and step."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from titan_loop.analysis.drawing import (
    Chart,
    Records,
    depth_colors,
    draw_curve,
    draw_panels,
    last,
    series,
    token_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PREFIX = "experts/load/"
_VISIT = re.compile(PREFIX + r"layer_(\d+)(?:_step_(\d+))?")


class Loads(NamedTuple):
    """Loads over the mean of one layer in one step; NaN in records of fewer steps."""

    layer: int
    step: int
    busiest: np.ndarray
    idlest: np.ndarray


def read_loads(records: Records) -> list[Loads]:
    """Return the loads of every visit that any record has, by layer and step."""

    def found() -> Iterator[Loads]:
        for key in {key for record in records for key in record}:
            if visit := _VISIT.fullmatch(key):
                loads = [record.get(key, [np.nan]) for record in records]
                busiest, idlest = (np.array([*map(end, loads)]) for end in (max, min))
                yield Loads(int(visit[1]), int(visit[2] or 1), busiest, idlest)

    return sorted(found(), key=lambda loads: loads[:2])


def plot_loads(records: Records, path: Path) -> Path:
    """Draw loads of the busiest and the idlest experts against tokens, a panel for each layer."""
    loads, tokens = read_loads(records), series(records, "tokens")
    layers = {f"layer {visit.layer}": visit.layer for visit in loads}

    def draw(axes: "Axes", name: str) -> None:
        visits = [visit for visit in loads if visit.layer == layers[name]]
        for visit, color in zip(visits, depth_colors(len(visits)), strict=True):
            draw_curve(axes, tokens, visit.busiest, color, label=f"step {visit.step}")
            draw_curve(axes, tokens, visit.idlest, color)
        token_axis(axes, tokens)

    worst = max(loads, key=lambda visit: np.nan_to_num(last(visit.busiest)))
    low = np.nanmin([last(visit.idlest) for visit in loads])
    title = (
        f"At the end experts take {low:.2f} to {last(worst.busiest):.2f} times an equal share of "
        f"tokens; the busiest is in layer {worst.layer}, step {worst.step}"
    )
    return draw_panels([*layers], draw, path, title=title, label="load over an equal share")


LOADS = Chart(
    "Loads of experts",
    "Tokens that choose the busiest and the idlest expert of each layer, over an equal share; "
    "darker lines are later recurrent steps.",
    lambda keys: any(key.startswith(PREFIX) for key in keys),
    plot_loads,
)
