"""PNG plots of a run: loss per recurrent step, exit distribution over time, bits per byte by depth.

matplotlib is imported when the first plot is drawn, with the Agg backend, so no display is needed.
Recurrent steps are ordered, so they share one sequential colour map: light is shallow,
dark is deep.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from titan_loop.errors import UserError
from titan_loop.evaluation.depth_report import DepthReport
from titan_loop.training.run_directory import RunDirectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (8.0, 4.8)
_DOTS_PER_INCH = 150
_BASELINE_STYLES = ("--", ":", "-.")
_BRANCH_COLORS = ("Blues", "Oranges", "Greens", "Purples")


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
    if _steps_with(records, "exit/pmf_"):
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
        steps = _steps_with(records, "ce/step_")
        tokens = _series(records, "tokens")
        for step, color in zip(steps, _depth_colors(len(steps)), strict=True):
            losses = _series(records, f"ce/step_{step}")
            axes.plot(tokens, losses, color=color, alpha=0.25, linewidth=0.8)
            axes.plot(tokens, _smoothed(losses), color=color, linewidth=1.6, label=str(step))
        _show_the_bulk(axes, np.concatenate([_series(records, f"ce/step_{s}") for s in steps]))
        axes.set_title("Training loss after each recurrent step")
        axes.set_ylabel("cross entropy (nats per token)")
        axes.legend(title="recurrent step", frameon=False)
        _token_axis(axes, tokens)

    return _save(draw, path)


def plot_exit_pmf(records: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw the mean exit distribution over training as a stacked area, the mean exit step on top.

    Args:
        records: Of `metrics.jsonl`.
        path: Where the PNG goes.
    """

    def draw(axes: "Axes") -> None:
        steps = _steps_with(records, "exit/pmf_")
        tokens = _series(records, "tokens")
        # A scheduled R may grow: steps that did not run yet have no mass.
        shares = [np.nan_to_num(_series(records, f"exit/pmf_{step}")) for step in steps]
        colors = _depth_colors(len(steps))
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
        _token_axis(axes, tokens)
        axes.grid(visible=False)
        mean_axes = axes.twinx()
        mean_axes.plot(
            tokens, _series(records, "exit/mean_step"), color="#d1495b", label="mean exit step"
        )
        mean_axes.set_ylim(1, max(len(steps), 2))
        mean_axes.set_ylabel("mean exit step", color="#d1495b")
        mean_axes.spines["top"].set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        axes.figure.legend(  # beside the axes: the area fills all of them
            handles[::-1], labels[::-1], loc="outside right upper", frameon=False
        )

    return _save(draw, path)


class StageCurve(NamedTuple):
    """One stage of a recipe, for `plot_recipe`.

    Attributes:
        name: Shown in the legend.
        start_tokens: Global tokens that its ancestors consumed.
        records: Of its `metrics.jsonl`.
    """

    name: str
    start_tokens: int
    records: Sequence[Mapping[str, Any]]


def plot_recipe(branches: Sequence[Sequence[StageCurve]], path: Path) -> Path:
    """Draw the last recurrent step's cross entropy over all stages of a recipe.

    Args:
        branches: For every branch the stages that no earlier branch holds, each with a record or
            more. A branch has a colour, from light to dark along its stages.
        path: Where the PNG goes.
    """

    def draw(axes: "Axes") -> None:
        import matplotlib as mpl

        everything: list[np.ndarray] = []
        most = 0.0
        for number, branch in enumerate(branches):
            color_map = _BRANCH_COLORS[number % len(_BRANCH_COLORS)]
            colors = mpl.colormaps[color_map](np.linspace(0.45, 0.95, len(branch)))
            for stage, color in zip(branch, colors, strict=True):
                tokens = stage.start_tokens + _series(stage.records, "tokens")
                losses = np.array([_last_step_loss(record) for record in stage.records])
                axes.plot(tokens, losses, color=color, alpha=0.25, linewidth=0.8)
                axes.plot(tokens, _smoothed(losses), color=color, linewidth=1.6, label=stage.name)
                everything.append(losses)
                most = max(most, float(tokens[-1]))
        _show_the_bulk(axes, np.concatenate(everything))
        axes.set_title("Training loss after the last recurrent step, stage by stage")
        axes.set_ylabel("cross entropy (nats per token)")
        axes.figure.legend(loc="outside right upper", frameon=False)
        _token_axis(axes, np.array([0.0, most]))
        axes.set_xlabel("tokens read since the first stage began")

    return _save(draw, path)


def _last_step_loss(record: Mapping[str, Any]) -> float:
    value = record.get(f"ce/step_{record['recurrent_steps']}")
    return math.nan if value is None else value


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
        figsize=(max(_SIZE_INCHES[0], 3.4 * len(names)), _SIZE_INCHES[1]),
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
        f"Held-out text by depth after {_short(report.tokens)} tokens; "
        f"grey: the trained R = {report.trained_recurrent_steps}"
    )
    return save_figure(figure, path)


def pyplot() -> Any:
    """Return matplotlib's pyplot with a backend that needs no display."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(draw: Callable[["Axes"], None], path: Path) -> Path:
    figure, axes = pyplot().subplots(figsize=_SIZE_INCHES, layout="constrained")
    plain(axes)
    draw(axes)
    return save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure as PNG, close it and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DOTS_PER_INCH)
    pyplot().close(figure)
    return path


def plain(axes: "Axes") -> None:
    """Give axes a light grid and no box."""
    axes.grid(visible=True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _depth_colors(count: int) -> list[Any]:
    import matplotlib as mpl

    return list(mpl.colormaps["viridis_r"](np.linspace(0.12, 0.95, count)))


def _steps_with(records: Sequence[Mapping[str, Any]], prefix: str) -> list[int]:
    """Return the recurrent steps that occur in any record under `prefix`."""
    keys = {key for record in records for key in record if key.startswith(prefix)}
    return sorted(int(key.removeprefix(prefix)) for key in keys)


def _series(records: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """Return one value per record, NaN where it is missing or null."""
    values = (record.get(key) for record in records)
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Return a centred running mean over 5 % of the records that ignores gaps and keeps them."""
    half = max(len(values) // 40, 0)
    windows = (values[max(i - half, 0) : i + half + 1] for i in range(len(values)))
    means = [np.nan if np.isnan(w).all() else float(np.nanmean(w)) for w in windows]
    return np.where(np.isnan(values), np.nan, means)


def _show_the_bulk(axes: "Axes", values: np.ndarray) -> None:
    """Cut the first steps' fall at the top, so that the differences between steps can be seen."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return
    low, high = float(finite.min()), float(np.quantile(finite, 0.9))
    if high > low:
        axes.set_ylim(low - 0.05 * (high - low), high + 0.35 * (high - low))


def _token_axis(axes: "Axes", tokens: np.ndarray) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.set_xlabel("tokens read")
    if tokens[0] < tokens[-1]:
        axes.set_xlim(tokens[0], tokens[-1] + 0.02 * (tokens[-1] - tokens[0]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))


def _short(count: float) -> str:
    for suffix in ("", "K", "M", "B"):
        if abs(count) < 1000:
            return f"{count:.3g}{suffix}"
        count /= 1000
    return f"{count:.3g}T"
