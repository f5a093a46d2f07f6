"""Plots of what happens inside a question's recurrent steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan_loop.analysis.drawing import depth_colors, draw_panels
from titan_loop.evaluation.logit_lens import Lens

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_lens(lenses: Sequence[Lens], path: Path) -> Path:
    """Draw accuracy over the layers of all steps: a panel a stratum, a line a waypoint."""
    strata = list(dict.fromkeys(lens.stratum for lens in lenses))
    waypoints = list(dict.fromkeys(lens.waypoint for lens in lenses))
    colors = dict(zip(waypoints, depth_colors(len(waypoints)), strict=True))

    def draw(axes: "Axes", stratum: str) -> None:
        for lens in lenses:
            if lens.stratum == stratum:
                layers = lens.accuracy.shape[1]
                at = [visit / layers for visit in range(1, lens.accuracy.size + 1)]
                axes.plot(
                    at,
                    100 * lens.accuracy.ravel(),
                    color=colors[lens.waypoint],
                    marker="o",
                    markersize=3,
                    label=lens.waypoint,
                )
        axes.set_ylim(-3, 103)
        axes.set_xlabel("recurrent steps, layer by layer")

    title = "Logit lens: the waypoint is the likeliest token"
    return draw_panels(strata, draw, path, title=title, label="% of questions", legend=True)
