"""First hit: the first recurrent step after which a question is answered right.

    t* = min { r : the answer's tokens are the likeliest after step r }

Source: recurrent-depth transformers, arXiv 2604.07822, Figure 8, whose dashed lines mark the mean
t* of each number of hops. Deviation: median and quartiles. A guess counts, here as there, so that
many steps before the answer is found make the lower quartile too early.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from titan_loop.analysis.drawing import COLORS, draw_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class FirstHits(NamedTuple):
    """Quartiles of t* over the questions that are right after some step, and their share.

    The quartiles are NaN if there is no such question.
    """

    lower: float
    median: float
    upper: float
    share: float


def first_hits(right_RW: np.ndarray) -> FirstHits:
    """Return the first hits of W questions, from whether each is right after R steps."""
    hit_W = right_RW.any(axis=0)
    if not hit_W.any():
        return FirstHits(np.nan, np.nan, np.nan, 0.0)
    steps = 1 + right_RW.argmax(axis=0)[hit_W]
    # "lower" keeps a quartile a number of steps that some question has.
    lower, median, upper = np.quantile(steps, (0.25, 0.5, 0.75), method="lower").tolist()
    return FirstHits(lower, median, upper, float(hit_W.mean()))


def draw_first_hits(found: Mapping[str, FirstHits], trained_steps: int, path: Path) -> Path:
    """Draw median and quartiles against strata, from easy to hard, and the trained steps."""

    def draw(axes: "Axes") -> None:
        low, middle, high = np.array([hits[:3] for hits in found.values()]).T
        bars = [middle - low, high - middle]
        axes.errorbar(range(len(found)), middle, yerr=bars, fmt="o", color=COLORS[0], elinewidth=1)
        axes.axhline(trained_steps, color="0.5", linestyle="--", linewidth=0.8)
        axes.text(0, trained_steps, "trained steps", va="bottom", color="0.4", fontsize=9)
        axes.set_xticks(range(len(found)), found, rotation=45, ha="right")
        axes.set_ylim(bottom=0)
        axes.locator_params(axis="y", integer=True)
        axes.set_ylabel("first step with a right answer")

    (first, easy), *_, (last, hard) = [*found.items()] * 2
    title = f"Half of the answers to {first} are right by step {easy.median:.0f}"
    return draw_axes(draw, path, title=f"{title}, to {last} by step {hard.median:.0f}")
