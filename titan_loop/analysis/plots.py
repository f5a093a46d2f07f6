"""PNG plots of a run: loss per recurrent step, exit distribution, bits per byte by depth."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_loop.analysis.drawing import (
    SIZE_INCHES,
    depth_colors,
    draw_axes,
    only_marker,
    plain,
    pyplot,
    save_figure,
    series,
    short,
    show_the_bulk,
    smoothed,
    steps_with,
    token_axis,
)
from titan_loop.errors import UserError
from titan_loop.evaluation.depth_report import DepthReport
from titan_loop.runs.run_directory import RunDirectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BASELINE_STYLES = ("--", ":", "-.")


def plot_run(run_directory: RunDirectory) -> list[Path]:
    """Draw every plot the run has data for into `plots/` and return the paths.

    Raises:
        UserError: If the run has logged nothing.
    """
    records = run_directory.read_metrics()
    if not records:
        raise UserError(
            f"{str(run_directory.metrics_jsonl)!r} has no records; train the run before plotting it"
        )
    folder = run_directory.plots
    paths = [plot_step_losses(records, folder / "loss_per_step.png")]
    if steps_with(records, "exit/pmf_"):
        paths.append(plot_exit_pmf(records, folder / "exit_pmf.png"))
    if any(run_directory.evaluations.glob("depth-step-*.json")):
        report = DepthReport.latest(run_directory)
        paths.append(plot_depths(report, folder / "bits_per_byte.png"))
    return paths


def plot_step_losses(records: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw the cross entropy after every recurrent step against tokens.

    Args:
        records: Of `metrics.jsonl`.
        path: Where the PNG goes.
    """

    def draw(axes: "Axes") -> None:
        steps = steps_with(records, "ce/step_")
        tokens = series(records, "tokens")
        for step, color in zip(steps, depth_colors(len(steps)), strict=True):
            losses = series(records, f"ce/step_{step}")
            axes.plot(tokens, losses, color=color, alpha=0.25, linewidth=0.8)
            axes.plot(
                tokens,
                smoothed(losses),
                color=color,
                linewidth=1.6,
                label=str(step),
                marker=only_marker(tokens),
            )
        show_the_bulk(axes, np.concatenate([series(records, f"ce/step_{s}") for s in steps]))
        axes.set_title("Training loss after each recurrent step")
        axes.set_ylabel("cross entropy (nats per token)")
        axes.legend(title="recurrent step", frameon=False, loc="upper right")
        token_axis(axes, tokens)

    return draw_axes(draw, path)


def plot_exit_pmf(records: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw the mean exit distribution over training as a stacked area, the mean exit step on top.

    Args:
        records: Of `metrics.jsonl`.
        path: Where the PNG goes.
    """

    def draw(axes: "Axes") -> None:
        steps = steps_with(records, "exit/pmf_")
        shown = [*records, *records] if len(records) == 1 else records
        tokens = series(shown, "tokens")
        if len(records) == 1:
            tokens = tokens * (0.98, 1.02)  # a bar: one record has no area
        # A scheduled R may grow: steps that did not run yet have no mass.
        shares = [np.nan_to_num(series(shown, f"exit/pmf_{step}")) for step in steps]
        colors = depth_colors(len(steps))
        axes.stackplot(
            tokens,
            *shares,
            colors=colors,
            labels=[f"step {step}" for step in steps],
            edgecolor="white",
            linewidth=0.4,
        )
        axes.set_ylim(0, 1)
        axes.set_title("Where tokens exit, averaged over the batch")
        axes.set_ylabel("exit probability")
        token_axis(axes, tokens)
        axes.grid(visible=False)
        mean_axes = axes.twinx()
        mean_axes.plot(
            tokens, series(shown, "exit/mean_step"), color="#d1495b", label="mean exit step"
        )
        mean_axes.set_ylim(1, max(len(steps), 2))
        mean_axes.set_ylabel("mean exit step", color="#d1495b")
        mean_axes.spines["top"].set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        axes.figure.legend(  # beside the axes: the area fills all of them
            handles[::-1], labels[::-1], loc="outside right upper", frameon=False
        )

    return draw_axes(draw, path)


def plot_depths(report: DepthReport, path: Path) -> Path:
    """Draw bits per byte against the number of recurrent steps, one panel per source.

    Bars are 95 % bootstrap intervals over windows, horizontal lines the baselines, and the vertical
    line the R that was trained.

    Args:
        report: The evaluation.
        path: Where the PNG goes.
    """
    plt = pyplot()
    names = list(report.sources)
    figure, grid = plt.subplots(
        1,
        len(names),
        figsize=(max(SIZE_INCHES[0], 3.4 * len(names)), SIZE_INCHES[1]),
        layout="constrained",
        squeeze=False,
    )
    for axes, name in zip(grid[0], names, strict=True):
        source = report.sources[name]
        depths = sorted(source.depths)
        intervals = [source.depths[depth] for depth in depths]
        values = np.array([interval.value for interval in intervals])
        below = values - np.array([interval.low for interval in intervals])
        above = np.array([interval.high for interval in intervals]) - values
        axes.errorbar(
            depths,
            values,
            yerr=np.maximum([below, above], 0),
            color="#1f4e79",
            marker="o",
            markersize=5,
            capsize=4,
        )
        for (baseline, value), style in zip(
            source.baselines.items(), _BASELINE_STYLES, strict=False
        ):
            axes.axhline(value, color="#d1495b", linestyle=style)
            axes.annotate(
                f"{baseline} {value:.3f}",
                (depths[-1], value),
                xytext=(0, 3),
                textcoords="offset points",
                ha="right",
                color="#d1495b",
                fontsize="small",
            )
        axes.axvline(report.trained_recurrent_steps, color="0.8", linewidth=6, alpha=0.5, zorder=0)
        axes.set_xticks(depths)
        axes.set_xlabel("recurrent steps R")
        axes.set_title(f"{name} ({source.n_bytes / 1000:,.0f} kB)")
        axes.margins(y=0.08)
        plain(axes)
    grid[0][0].set_ylabel("bits per byte (lower is better)")
    figure.suptitle(
        f"Held-out text by depth after {short(report.tokens)} tokens; "
        f"grey: the trained R = {report.trained_recurrent_steps}"
    )
    return save_figure(figure, path)
