"""The plot of experts' loads over training: a map for each layer and recurrent step.

A load is divided by the mean load of its visit: 1 is an equal share, 0 an expert that no token
chose, E/k an expert that every token chose. Visits beyond `_MOST_PANELS` are left out, the most
equal ones first.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from titan_loop.analysis.drawing import Chart, Records, draw_panels, series, token_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PREFIX = "experts/load/"
_VISIT = re.compile(PREFIX + r"layer_(\d+)(?:_step_(\d+))?")
_MOST_PANELS = 12
_MOST_COLUMNS = 200
"""Columns of a map, along time; each is the mean of neighbouring records."""
_LAST_SHARE = 0.1
"""Share of the records, at the end, whose mean decides the title and the order of visits."""
_TWICE = 2.0
"""Loads from 1/4 to 4 have shades of their own: two doublings on each side of an equal share."""


class Loads(NamedTuple):
    """Loads of one visit.

    Attributes:
        name: Layer and step, for a reader.
        values: Load over the mean, (records, experts); NaN where the visit did not happen.
    """

    name: str
    values: np.ndarray

    @property
    def last(self) -> np.ndarray:
        """Mean load of every expert at the end of training; NaN if the visit has ended."""
        tail = self.values[-max(1, round(_LAST_SHARE * len(self.values))) :]
        seen = tail[~np.isnan(tail[:, 0])]
        return seen.mean(0) if len(seen) else np.full(self.values.shape[1], np.nan)


def read_loads(records: Records) -> list[Loads]:
    """Return the loads of every visit that any record has, by layer and step."""
    keys = {key for record in records for key in record if key.startswith(PREFIX)}
    matches = {key: _VISIT.fullmatch(key) for key in keys}
    order = {key: (int(found[1]), int(found[2] or 0)) for key, found in matches.items() if found}
    loads = []
    for key, (layer, step) in sorted(order.items(), key=lambda item: item[1]):
        experts = max(len(record[key]) for record in records if key in record)
        none = [np.nan] * experts
        values = np.array([record.get(key, none) for record in records], dtype=np.float64)
        loads.append(Loads(f"layer {layer}" + (f", step {step}" if step else ""), values))
    return loads


def title_of(loads: list[Loads], shown: int) -> str:
    """Return the plot's title: the range of loads at the end, and the busiest expert."""
    ended = [visit for visit in loads if not np.isnan(visit.last).any()]
    worst = max(ended, key=lambda visit: visit.last.max())
    low = min(visit.last.min() for visit in ended)
    busiest = int(worst.last.argmax()) + 1
    title = (
        f"At the end experts take {low:.2f} to {worst.last.max():.2f} times an equal share of "
        f"tokens; the busiest is expert {busiest} of {worst.name}"
    )
    left = "" if shown == len(loads) else f"\nthe {shown} least equal of {len(loads)} visits"
    return title + left


def plot_loads(records: Records, path: Path) -> Path:
    """Draw the load of every expert against tokens, a panel for each layer and step.

    Args:
        records: Records of `metrics.jsonl`, as `MoEDecoder.record` makes them.
        path: The PNG to write.
    """
    loads = read_loads(records)
    least_equal = sorted(loads, key=lambda visit: -np.nan_to_num(visit.last.max(), nan=-1.0))
    kept = {visit.name for visit in least_equal[:_MOST_PANELS]}
    panels = {visit.name: visit.values for visit in loads if visit.name in kept}
    tokens = series(records, "tokens")

    def draw(axes: "Axes", name: str) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        columns = np.array_split(np.arange(len(tokens)), min(len(tokens), _MOST_COLUMNS))
        edges = np.array([0.0, *(tokens[column[-1]] for column in columns)])
        means = np.stack([_mean(panels[name][column]) for column in columns])
        doublings = np.log2(np.clip(means, 2**-_TWICE, 2**_TWICE)).T
        experts = np.arange(len(doublings) + 1) + 0.5
        axes.grid(visible=False)
        axes.set_facecolor("0.85")  # where the visit did not happen
        image = axes.pcolormesh(
            edges, experts, doublings, cmap="PuOr_r", vmin=-_TWICE, vmax=_TWICE, rasterized=True
        )
        axes.yaxis.set_major_locator(MaxNLocator(10, integer=True))
        token_axis(axes, edges)
        axes.set_xlim(0, edges[-1])
        if name == list(panels)[-1]:
            drawn = [each for each in axes.figure.axes if each.get_visible()]
            bar = axes.figure.colorbar(image, ax=drawn, label="load over an equal share")
            bar.ax.yaxis.set_major_formatter(FuncFormatter(_share))

    title = title_of(loads, len(panels))
    return draw_panels(list(panels), draw, path, title=title, label="expert", columns=4)


def _mean(values: np.ndarray) -> np.ndarray:
    seen = values[~np.isnan(values[:, 0])]
    return seen.mean(0) if len(seen) else np.full(values.shape[1], np.nan)


def _share(doublings: float, _: int) -> str:
    """Return the label of a shade; the two end shades stand for all loads beyond them, too."""
    sign = {-_TWICE: "≤ ", _TWICE: "≥ "}.get(doublings, "")
    return f"{sign}{2**doublings:.2g}"


LOADS = Chart(
    "Loads of experts",
    "Tokens that choose each expert, over an equal share of its layer and step; orange is busy, "
    "purple idle, grey a step that was not run.",
    lambda keys: any(key.startswith(PREFIX) for key in keys),
    plot_loads,
)
