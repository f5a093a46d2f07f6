"""The look that all plots share: one style, one colour scale for depth, one axis of tokens.

matplotlib is imported when the first plot is drawn. Recurrent steps are ordered, so they share one
sequential colour map: light is shallow, dark is deep.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
else:
    Axes = Any

Records = Sequence[Mapping[str, Any]]


class Chart(NamedTuple):
    """A plot of `metrics.jsonl` in `titan-loop plot` and `report`; families add their own.

    Attributes:
        needs: Maps the names of all recorded metrics to whether there is something to draw.
        draw: Writes the PNG of the records at a path, and returns the path.
    """

    title: str
    text: str
    needs: Callable[[set[str]], bool]
    draw: Callable[[Records, Path], Path]


_SIZE_INCHES = (8.0, 4.8)
_STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "figure.figsize": _SIZE_INCHES,
    "grid.color": "0.9",
    "legend.frameon": False,
    "savefig.dpi": 150,
}


def pyplot() -> Any:
    """Return matplotlib's pyplot in our style, with a backend that needs no display."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.style.use(_STYLE)
    return plt


def draw_axes(draw: Callable[[Axes], None], path: Path) -> Path:
    """Write one pair of axes, filled by `draw`, as PNG."""
    figure, axes = pyplot().subplots()
    draw(axes)
    return save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure as PNG, close it and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot().close(figure)
    return path


def draw_panels(
    names: Sequence[str],
    draw: Callable[[Axes, str], None],
    path: Path,
    *,
    title: str,
    label: str = "",
    columns: int = 3,
    legend: bool = False,
) -> Path:
    """Write a panel for each name, filled by `draw`, as one PNG.

    Args:
        names: Title of each panel, at least one.
        label: Label of the vertical axes, where all panels share one.
        legend: Whether to show the labels of the first panel below all panels.
    """
    columns = min(len(names), columns)
    rows = -(-len(names) // columns)
    figure, grid = pyplot().subplots(
        rows,
        columns,
        figsize=(max(_SIZE_INCHES[0], 4.2 * columns), 3.9 * rows + 0.6),
        squeeze=False,
    )
    for axes in list(grid.flat)[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(grid.flat, names, strict=False):
        axes.set_title(name)
        draw(axes, name)
    for row in grid if label else ():
        row[0].set_ylabel(label)
    if legend:
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=8)
    figure.suptitle(title)
    return save_figure(figure, path)


def draw_curve(
    axes: Axes, tokens: np.ndarray, values: np.ndarray, color: Any, label: str | None = None
) -> None:
    """Draw a noisy series: faint as it is, and strong as its running mean."""
    axes.plot(tokens, values, color=color, alpha=0.25, linewidth=0.8)
    mean, marker = smoothed(values), only_marker(tokens)
    axes.plot(tokens, mean, color=color, linewidth=1.6, label=label, marker=marker)


def mark_trained_depth(axes: Axes, depths: Sequence[int], recurrent_steps: int) -> None:
    """Let the horizontal axis count recurrent steps, with a grey bar at the trained R."""
    axes.axvline(recurrent_steps, color="0.8", linewidth=6, alpha=0.5, zorder=0)
    axes.set_xticks(list(depths))
    axes.set_xlabel("recurrent steps R")


def only_marker(values: np.ndarray) -> str | None:
    """Return the marker of a curve: a curve of one point would be invisible without one."""
    return "o" if len(values) == 1 else None


def depth_colors(count: int) -> list[Any]:
    """Return a colour for each recurrent step, light for shallow."""
    import matplotlib as mpl

    return list(mpl.colormaps["viridis_r"](np.linspace(0.12, 0.95, count)))


def steps_with(records: Records, prefix: str) -> list[int]:
    """Return the recurrent steps that occur in any record under `prefix`."""
    keys = {key for record in records for key in record if key.startswith(prefix)}
    return sorted(int(key.removeprefix(prefix)) for key in keys)


def series(records: Records, key: str) -> np.ndarray:
    """Return one value per record, NaN where it is missing or null."""
    return np.array([record.get(key) for record in records], dtype=np.float64)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return a centred running mean over 5 % of the records that ignores gaps and keeps them."""
    half = max(len(values) // 40, 0)
    windows = (values[max(i - half, 0) : i + half + 1] for i in range(len(values)))
    means = [np.nan if np.isnan(w).all() else float(np.nanmean(w)) for w in windows]
    return np.where(np.isnan(values), np.nan, means)


def show_the_bulk(axes: Axes, values: np.ndarray) -> None:
    """Cut the first steps' fall at the top, so that the differences between steps can be seen."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return
    low, high = float(finite.min()), float(np.quantile(finite, 0.9))
    if high > low:
        axes.set_ylim(low - 0.05 * (high - low), high + 0.35 * (high - low))


def token_axis(axes: Axes, tokens: np.ndarray) -> None:
    """Let the horizontal axis count tokens."""
    from matplotlib.ticker import FuncFormatter

    axes.set_xlabel("tokens read")
    if tokens[0] < tokens[-1]:
        axes.set_xlim(tokens[0], tokens[-1] + 0.02 * (tokens[-1] - tokens[0]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def short(count: float) -> str:
    """Return a count with three digits and K, M, B or T."""
    for suffix in ("", "K", "M", "B"):
        if abs(count) < 1000:
            return f"{count:.3g}{suffix}"
        count /= 1000
    return f"{count:.3g}T"
