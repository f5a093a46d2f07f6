"""Plots of what happens inside a question's recurrent steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from titan_loop.analysis.drawing import depth_colors, draw_axes, draw_panels
from titan_loop.evaluation.logit_lens import Lens
from titan_loop.evaluation.patching import Visit
from titan_loop.evaluation.step_exam import StepExam

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_lens(lenses: Sequence[Lens], path: Path) -> Path:
    """Draw accuracy over the layers of all steps: a panel a stratum, a line a waypoint."""
    strata = list(dict.fromkeys(lens.stratum for lens in lenses))
    waypoints = list(dict.fromkeys(lens.waypoint for lens in lenses))
    colors = dict(zip(waypoints, depth_colors(len(waypoints)), strict=True))

    def draw(axes: "Axes", stratum: str) -> None:
        for waypoint, color in colors.items():  # also those of other panels, for the legend
            curve = [x for x in lenses if (x.stratum, x.waypoint) == (stratum, waypoint)]
            values = 100 * curve[0].accuracy.ravel() if curve else np.array([])
            at = np.arange(1, len(values) + 1) / lenses[0].accuracy.shape[1]
            axes.plot(at, values, color=color, marker="o", markersize=3, label=waypoint)
        axes.set_ylim(-3, 103)
        axes.set_xlabel("recurrent steps, layer by layer")

    title = "Logit lens: the waypoint is the likeliest token"
    return draw_panels(strata, draw, path, title=title, label="% of questions", legend=True)


def draw_step_accuracy(found: Mapping[str, StepExam], trained_steps: int, path: Path) -> Path:
    """Draw the accuracy of every stratum after every step as a map."""

    def draw(axes: "Axes") -> None:
        shares = 100 * np.array([exam.accuracy for exam in found.values()]).T
        steps = len(shares)
        image = axes.imshow(
            shares,
            origin="lower",
            aspect="auto",
            vmin=0,
            vmax=100,
            cmap="viridis",
            extent=(-0.5, len(found) - 0.5, 0.5, steps + 0.5),
        )
        axes.figure.colorbar(image, label="% right")
        axes.axhline(trained_steps + 0.5, color="tab:red", linestyle="--", linewidth=1)
        axes.set_xticks(range(len(found)), found, rotation=45, ha="right")
        axes.set_ylabel("recurrent steps")
        axes.grid(visible=False)

    return draw_axes(draw, path)


def draw_margins(found: Mapping[str, StepExam], trained_steps: int, path: Path) -> Path:
    """Draw the margin over steps, a line a stratum."""

    def draw(axes: "Axes") -> None:
        for (name, exam), color in zip(found.items(), depth_colors(len(found)), strict=True):
            steps = range(1, len(exam.margin) + 1)
            axes.plot(steps, exam.margin, color=color, label=name)
        axes.axhline(0, color="0.6", linewidth=0.8)
        axes.axvline(trained_steps, color="0.8", linewidth=6, alpha=0.5, zorder=0)
        axes.set_xlabel("recurrent steps")
        axes.set_ylabel("logit margin of the answer")
        axes.figure.legend(loc="outside right upper", frameon=False)

    return draw_axes(draw, path)


def draw_halting(found: Mapping[str, StepExam], path: Path) -> Path:
    """Draw mean steps and accuracy over the strata, a line a policy."""
    panels = {"mean recurrent steps": "mean_steps", "share of right answers": "accuracy"}
    policies = next(iter(found.values())).halting

    def draw(axes: "Axes", name: str) -> None:
        for policy in policies:
            values = [getattr(exam.halting[policy], panels[name]) for exam in found.values()]
            axes.plot(range(len(found)), values, marker="o", markersize=3, label=policy)
        axes.set_xticks(range(len(found)), found, rotation=60, ha="right")

    return draw_panels(list(panels), draw, path, title="Exit policies", columns=2, legend=True)


def draw_patching(visits: Sequence[Visit], change: np.ndarray, stratum: str, path: Path) -> Path:
    """Draw the change of the margin by position and visit, blue where the answer suffers."""

    def draw(axes: "Axes") -> None:
        most = float(np.abs(change).max()) or 1.0
        image = axes.imshow(
            change, origin="lower", aspect="auto", vmin=-most, vmax=most, cmap="RdBu"
        )
        axes.figure.colorbar(image, label="change of the logit margin")
        names = ["embedding", *(f"{step}.{layer}" for step, layer in visits[1:])]
        every = -(-len(names) // 20)
        axes.set_yticks(range(0, len(names), every), names[::every])
        axes.set_xticks(range(0, change.shape[1], -(-change.shape[1] // 20)))
        axes.set_xlabel("position")
        axes.set_ylabel("step.layer")
        axes.set_title(f"Questions of {stratum}")
        axes.grid(visible=False)

    return draw_axes(draw, path)


def draw_intervention(
    found: Mapping[str, Sequence[float]], strengths: Sequence[float], path: Path
) -> Path:
    """Draw the accuracy of every stratum over the strength of an intervention."""

    def draw(axes: "Axes") -> None:
        colors = depth_colors(len(found))
        for (name, shares), color in zip(found.items(), colors, strict=True):
            percent = [100 * share for share in shares]
            axes.plot(strengths, percent, color=color, marker="o", label=name)
        axes.set_ylim(-3, 103)
        axes.set_xlabel("share of the embedding in the state")
        axes.set_ylabel("% right")
        axes.legend()

    return draw_axes(draw, path)
