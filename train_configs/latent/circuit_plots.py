"""Plots of the circuits of a latent-space model."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from titan_loop.analysis.drawing import COLORS, draw_panels

from .circuits import Circuits, places

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_variance(circuits: Circuits, path: Path) -> Path:
    """Draw the relative variance of every head where one name, or value, changes; write a PNG."""
    tables = {
        "first layer, names": circuits.name_variance,
        "last layer, values": circuits.value_variance,
    }

    def draw(axes: "Axes", name: str) -> None:
        table = np.array(tables[name])
        axes.grid(visible=False)
        image = axes.imshow(table, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_yticks(range(len(table)), places(len(circuits.value_groups))[: len(table)])
        axes.set_xticks(range(table.shape[1]))
        axes.set_xlabel("head")
        axes.figure.colorbar(image, ax=axes)

    table = np.array(circuits.value_variance)
    place, head = np.unravel_index(table.argmax(), table.shape)
    where = places(len(circuits.value_groups))[place]
    title = f"Head {head} of the last layer follows {where} most: {table.max():.0%} of its variance"
    return draw_panels(list(tables), draw, path, title=title)


def draw_frequencies(circuits: Circuits, path: Path) -> Path:
    """Draw the mean norm of the DFT by pattern of frequencies, one panel per site; write a PNG."""
    sites = list(circuits.frequencies)

    def draw(axes: "Axes", site: str) -> None:
        norms = circuits.frequencies[site]
        axes.barh(list(norms), np.array([*norms.values()]) / max(norms.values()), color=COLORS[0])
        axes.invert_yaxis()
        axes.set_xlabel("mean norm over the largest")

    norms = circuits.frequencies[sites[-1]]
    largest = max(norms, key=norms.__getitem__)
    title = f"In {sites[-1]} the values' frequencies {largest} are strongest (equal letters: equal)"
    label = "frequencies of the values"
    return draw_panels(sites, draw, path, title=title, label=label, columns=4, inches=(3.0, 2.8))
