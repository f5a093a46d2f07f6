"""PNG plots against tokens read: losses, exits and held-out text."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from titan_loop.analysis import drawing
from titan_loop.analysis.drawing import COLORS, Axes, Chart, Records, last, series
from titan_loop.evaluation.evals_log import HeldOutRecord
from titan_loop.plugins import find, names


def plot_step_losses(records: Records, path: Path) -> Path:
    """Draw the cross entropy after every recurrent step against tokens."""
    losses = {s: series(records, f"ce/step_{s}") for s in drawing.steps_with(records, "ce/step_")}

    def draw(axes: Axes) -> None:
        tokens = series(records, "tokens")
        colors = drawing.depth_colors(len(losses))
        for (step, values), color in zip(losses.items(), colors, strict=True):
            drawing.draw_curve(axes, tokens, values, color, label=f"step {step}")
        drawing.show_the_bulk(axes, np.concatenate([*losses.values()]))
        axes.set_ylabel("training cross entropy (nats per token)")
        drawing.token_axis(axes, tokens)

    ends = [
        f"{last(losses[s]):.3f} after recurrent step {s}"
        for s in drawing.steps_with(records[-1:], "ce/step_")
    ]
    title = f"Training loss ends at {', '.join(dict.fromkeys([*ends[-1:], *ends[:1]]))}"
    return drawing.draw_axes(draw, path, title=title)


def plot_exits(records: Records, path: Path) -> Path:
    """Draw the mean exit distribution as a stacked area, below it mean exit step and entropy."""
    mean, entropy = series(records, "exit/mean_step"), series(records, "exit/entropy_nats")
    steps = drawing.steps_with(records, "exit/pmf_")

    def draw(axes: Axes, panel: str) -> None:
        tokens = series(records, "tokens")
        drawing.token_axis(axes, tokens)
        if panel == "mean exit step":
            axes.set_ylim(1, max(len(steps), 2))
            drawing.draw_curve(axes, tokens, mean, COLORS[1])
        elif panel == "exit probability":
            _stack(axes, tokens, steps, records)
        else:
            bound = np.log(series(records, "recurrent_steps"))
            drawing.draw_curve(axes, tokens, entropy, COLORS[0], label="exits")
            axes.plot(tokens, bound, color="0.4", linestyle="--", label="uniform exits")
            axes.set_ylim(bottom=0)

    panels = ["exit probability", "mean exit step"]
    if not np.isnan(entropy).all():
        panels.append("entropy (nats)")
    title = f"Tokens leave after {last(mean):.2f} steps at the end, averaged over the batch"
    return drawing.draw_panels(panels, draw, path, title=title, columns=1, inches=(8, 2.8))


def _stack(axes: Axes, tokens: np.ndarray, steps: Sequence[int], records: Records) -> None:
    # R may grow by a schedule: steps that do not run yet have no mass.
    shares = np.array([np.nan_to_num(series(records, f"exit/pmf_{step}")) for step in steps])
    if len(tokens) == 1:  # a bar, since one record has no area
        tokens, shares = tokens * (0.98, 1.02), np.repeat(shares, 2, axis=1)
    colors = drawing.depth_colors(len(steps))
    labels = [f"step {step}" for step in steps]
    axes.stackplot(tokens, *shares, labels=labels, colors=colors, edgecolor="white")
    axes.set_ylim(0, 1)
    axes.grid(visible=False)


def plot_held_out(records: Sequence[HeldOutRecord], path: Path) -> Path:
    """Draw held-out bits per byte while training, one panel per source, one line per depth."""
    names = list(dict.fromkeys(name for record in records for name in record.bits_per_byte))
    depths = sorted({r for record in records for at in record.bits_per_byte.values() for r in at})
    tokens = np.array([float(record.tokens) for record in records])

    def draw(axes: Axes, name: str) -> None:
        for depth, color in zip(depths, drawing.depth_colors(len(depths)), strict=True):
            values = [record.bits_per_byte.get(name, {}).get(depth, math.nan) for record in records]
            axes.plot(tokens, values, color=color, label=f"R = {depth}", marker="o", markersize=3)
        drawing.token_axis(axes, tokens)

    ends = [at for at in records[-1].bits_per_byte.values() if at]
    title = best_depth([min(at, key=at.__getitem__) for at in ends]) + " at the end"
    label = "held-out bits per byte (lower is better)"
    return drawing.draw_panels(names, draw, path, title=title, label=label, columns=4)


def best_depth(best: Sequence[int]) -> str:
    """Return a title that names the most frequent of the panels' best R."""
    steps = Counter(best).most_common(1)[0][0]
    return f"R = {steps} is best in {best.count(steps)} of {len(best)} panels"


_CHARTS = {
    "loss_per_step": Chart(
        "Loss per recurrent step",
        "Training cross entropy after each step; light is shallow, dark is deep. A step "
        "that is worth its compute lies below the one before it.",
        lambda keys: any(key.startswith("ce/step_") for key in keys),
        plot_step_losses,
    ),
    "exit_pmf": Chart(
        "Where tokens exit",
        "The exit gate's mean distribution over steps, its mean, and its entropy: near the dashed "
        "line the gate prefers no step; at 0 it is certain of one for every token.",
        lambda keys: any(key.startswith("exit/pmf_") for key in keys),
        plot_exits,
    ),
}


def charts(records: Records) -> dict[str, Chart]:
    """Return the charts of training metrics that have something to draw, the families' last."""
    keys = {key for record in records for key in record}
    found = {**_CHARTS, **{name: find("charts", name) for name in names("charts")}}
    return {name: chart for name, chart in found.items() if chart.needs(keys)}
