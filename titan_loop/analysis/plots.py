"""PNG plots over training: losses, exits, held-out text, mixture and throughput against tokens."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from titan_loop.analysis.drawing import (
    Axes,
    Chart,
    Records,
    depth_colors,
    draw_axes,
    draw_curve,
    draw_panels,
    only_marker,
    pyplot,
    save_figure,
    series,
    show_the_bulk,
    steps_with,
    token_axis,
)
from titan_loop.data.load.mixture import parse_mixture
from titan_loop.data.load.mixture_sources import named_sources
from titan_loop.evaluation.evals_log import HeldOutRecord
from titan_loop.plugins import find, names


def plot_step_losses(records: Records, path: Path) -> Path:
    """Draw the cross entropy after every recurrent step against tokens."""

    def draw(axes: Axes) -> None:
        steps = steps_with(records, "ce/step_")
        tokens = series(records, "tokens")
        for step, color in zip(steps, depth_colors(len(steps)), strict=True):
            losses = series(records, f"ce/step_{step}")
            draw_curve(axes, tokens, losses, color, label=str(step))
        show_the_bulk(axes, np.concatenate([series(records, f"ce/step_{s}") for s in steps]))
        axes.set_title("Training loss after each recurrent step")
        axes.set_ylabel("cross entropy (nats per token)")
        axes.legend(title="recurrent step", loc="upper right")
        token_axis(axes, tokens)

    return draw_axes(draw, path)


def plot_exit_pmf(records: Records, path: Path) -> Path:
    """Draw the mean exit distribution as a stacked area, with the mean exit step on top."""

    def draw(axes: Axes) -> None:
        steps = steps_with(records, "exit/pmf_")
        shown = [*records, *records] if len(records) == 1 else records
        tokens = series(shown, "tokens")
        if len(records) == 1:
            tokens = tokens * (0.98, 1.02)  # a bar: one record has no area
        # A scheduled R may grow: steps that did not run yet have no mass.
        shares = [np.nan_to_num(series(shown, f"exit/pmf_{step}")) for step in steps]
        colors, labels = depth_colors(len(steps)), [f"step {step}" for step in steps]
        axes.stackplot(tokens, *shares, colors=colors, labels=labels, edgecolor="white")
        axes.set_ylim(0, 1)
        axes.set_title("Where tokens exit, averaged over the batch")
        axes.set_ylabel("exit probability")
        token_axis(axes, tokens)
        axes.grid(visible=False)
        mean_axes = axes.twinx()
        mean_axes.plot(tokens, series(shown, "exit/mean_step"), color="#d1495b")
        mean_axes.set_ylim(1, max(len(steps), 2))
        mean_axes.set_ylabel("mean exit step", color="#d1495b")
        mean_axes.spines["right"].set_visible(True)
        mean_axes.grid(visible=False)
        handles, labels = axes.get_legend_handles_labels()
        axes.figure.legend(  # beside the axes: the area fills all of them
            handles[::-1], labels[::-1], loc="outside right upper"
        )

    return draw_axes(draw, path)


def plot_held_out(records: Sequence[HeldOutRecord], path: Path) -> Path:
    """Draw held-out bits per byte while training, one panel per source, one line per depth."""
    names = list(dict.fromkeys(name for record in records for name in record.bits_per_byte))
    depths = sorted({r for record in records for at in record.bits_per_byte.values() for r in at})
    tokens = np.array([float(record.tokens) for record in records])

    def draw(axes: Axes, name: str) -> None:
        for depth, color in zip(depths, depth_colors(len(depths)), strict=True):
            values = [record.bits_per_byte.get(name, {}).get(depth, math.nan) for record in records]
            axes.plot(tokens, values, color=color, label=f"R = {depth}", marker="o", markersize=3)
        token_axis(axes, tokens)

    title, label = "Held-out text while training, by depth", "bits per byte (lower is better)"
    return draw_panels(names, draw, path, title=title, label=label, columns=4, legend=True)


def plot_entropy(records: Records, path: Path) -> Path:
    """Draw the mean entropy of the exit distribution, below a uniform one's."""

    def draw(axes: Axes) -> None:
        tokens, entropy = series(records, "tokens"), series(records, "exit/entropy_nats")
        draw_curve(axes, tokens, entropy, "#1f4e79", label="exit distribution")
        bound = np.log(series(records, "recurrent_steps"))
        axes.plot(tokens, bound, color="0.4", linestyle="--", label="uniform over R steps")
        top = np.nanmax(bound) if np.isfinite(bound).any() else math.nan
        axes.set_ylim(0, max(1.08 * top, 0.1) if math.isfinite(top) else None)
        axes.set_title("Entropy of the exit distribution")
        axes.set_ylabel("entropy (nats)")
        axes.legend(frameon=False, loc="lower right")
        token_axis(axes, tokens)

    return draw_axes(draw, path)


def plot_mixture(records: Records, mixture: Sequence[str], path: Path) -> Path:
    """Draw each source's share of the tokens read so far, and dashed the share in the mixture."""
    suffix = "/tokens"
    keys = {key for record in records for key in record if key.startswith("data/")}
    names = sorted(key[len("data/") : -len(suffix)] for key in keys if key.endswith(suffix))
    asked = _asked_shares(mixture)

    def draw(axes: Axes) -> None:
        import matplotlib as mpl

        tokens = series(records, "tokens")
        read = np.array([np.nan_to_num(series(records, f"data/{n}{suffix}")) for n in names])
        total = np.maximum(read.sum(axis=0), 1)
        for index, name in enumerate(names):
            color = mpl.colormaps["tab10"](index % 10)
            # matplotlib leaves labels with an underscore in front out of its legend.
            label = f" {name}" if name.startswith("_") else name
            # Thinner from line to line, and dashes one after another: equal shares stay visible.
            axes.plot(
                tokens,
                read[index] / total,
                color=color,
                label=label,
                marker=only_marker(tokens),
                linewidth=1.5 + 1.5 * (len(names) - 1 - index),
            )
            if name in asked:
                dashes = (6 * index, (6, 6 * max(len(names) - 1, 1)))
                axes.axhline(asked[name], color=color, linestyle=dashes, linewidth=1.0)
        axes.set_ylim(0, 1.02)
        axes.set_title("Share of each source in the tokens read so far")
        axes.set_ylabel("share")
        axes.figure.legend(loc="outside right upper")
        token_axis(axes, tokens)

    return draw_axes(draw, path)


def _asked_shares(mixture: Sequence[str]) -> dict[str, float]:
    if not mixture:
        return {}
    entries = parse_mixture(mixture)
    total = sum(entry.weight for entry in entries)
    names = named_sources([entry.path for entry in entries])
    return {name: e.weight / total for name, e in zip(names, entries, strict=True)}


def plot_throughput(records: Records, path: Path) -> Path:
    """Draw tokens per second, and below it the share of the time spent waiting for data."""
    tokens = series(records, "tokens")
    figure, (speed_axes, wait_axes) = pyplot().subplots(2, 1, height_ratios=(3, 1), sharex=True)
    speed = series(records, "tokens_per_second")
    draw_curve(speed_axes, tokens, speed, "#1f4e79")
    speed_axes.set_ylim(bottom=0)
    speed_axes.set_title("Throughput, all ranks together")
    speed_axes.set_ylabel("tokens per second")
    waiting = series(records, "data_wait")
    wait_axes.plot(tokens, waiting, color="#d1495b", marker=only_marker(tokens))
    wait_axes.set_ylim(0, 1)
    wait_axes.set_ylabel("waiting for data")
    token_axis(wait_axes, tokens)
    return save_figure(figure, path)


_CHARTS = {
    "loss_per_step": Chart(
        "Loss per recurrent step",
        "Training cross entropy read out after each step; light is shallow, dark is deep. A step "
        "that is worth its compute lies below the one before it.",
        lambda keys: any(key.startswith("ce/step_") for key in keys),
        plot_step_losses,
    ),
    "exit_pmf": Chart(
        "Where tokens exit",
        "The exit gate's mean distribution over steps, and the mean exit step.",
        lambda keys: any(key.startswith("exit/pmf_") for key in keys),
        plot_exit_pmf,
    ),
    "exit_entropy": Chart(
        "Entropy of the exit distribution",
        "Near the dashed line the gate does not decide at all; at 0 it has collapsed to one step.",
        lambda keys: "exit/entropy_nats" in keys,
        plot_entropy,
    ),
    "throughput": Chart(
        "Throughput",
        "Tokens per second between two records, and the share of the time that training waited "
        "for data.",
        lambda keys: "tokens_per_second" in keys,
        plot_throughput,
    ),
}


def charts(records: Records) -> dict[str, Chart]:
    """Return the charts of training metrics that have something to draw; families' come last."""
    keys = {key for record in records for key in record}
    found = {**_CHARTS, **{name: find("charts", name) for name in names("charts")}}
    return {name: chart for name, chart in found.items() if chart.needs(keys)}
