"""Plots of the circuits of a latent-space model."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from titan_loop.analysis.drawing import draw_axes, draw_panels
from titan_loop.families.latent.circuits import Circuits, places

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

    return draw_panels(list(tables), draw, path, title="Relative variance of head outputs")


def draw_frequencies(circuits: Circuits, path: Path) -> Path:
    """Draw the mean norm of the DFT by site and pattern of frequencies; write a PNG."""

    def draw(axes: "Axes") -> None:
        sites = list(circuits.frequencies)
        patterns = list(circuits.frequencies[sites[0]])
        for number, site in enumerate(sites):
            norms = np.array([circuits.frequencies[site][pattern] for pattern in patterns])
            places = np.arange(len(patterns)) + 0.2 * (number - (len(sites) - 1) / 2)
            axes.bar(places, norms / norms.max(), width=0.18, label=site)
        axes.set_xticks(range(len(patterns)), patterns)
        axes.set_xlabel("frequencies of the values; equal letters, equal frequencies")
        axes.set_ylabel("mean norm over the largest of its site")
        axes.set_title("DFT of activations over all values of the operands")
        axes.figure.legend(loc="outside right upper")

    return draw_axes(draw, path)
