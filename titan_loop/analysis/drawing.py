"""The look that all plots share: a conclusion as title, a legend beside the axes, six colours.

matplotlib is imported when the first plot is drawn. Recurrent steps are ordered, so they share one
sequential colour map: light is shallow, dark is deep. At most six series have a colour; grey ones
are context.

Source of the colours: Okabe and Ito 2008, Color Universal Design.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
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
        text: Caption below the title in the report.
        needs: Tells from the names of all recorded metrics whether there is something to draw.
        draw: Writes a PNG of the records to a path, and returns the path.
    """

    title: str
    text: str
    needs: Callable[[set[str]], bool]
    draw: Callable[[Records, Path], Path]


COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "0.55"


def pyplot() -> Any:
    """Return matplotlib's pyplot in our style, with a backend that needs no display."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.style.use(Path(__file__).with_suffix(".mplstyle"))
    return plt


def draw_axes(draw: Callable[[Axes], None], path: Path, *, title: str) -> Path:
    """Write one pair of axes, filled by `draw`, as PNG."""
    return draw_panels([""], lambda axes, _: draw(axes), path, title=title)


def draw_panels(
    names: Sequence[str],
    draw: Callable[[Axes, str], None],
    path: Path,
    *,
    title: str,
    label: str = "",
    columns: int = 3,
    inches: tuple[float, float] = (4.2, 3.9),
) -> Path:
    """Write a panel for each name, filled by `draw`, as one PNG.

    A panel has its legend beside it; if all panels have the same one, the figure has it once.

    Args:
        names: Title of each panel, at least one.
        title: The conclusion that a reader should draw.
        inches: Width and height of a panel.
    """
    columns = min(len(names), columns)
    rows = -(-len(names) // columns)
    width = max(8.0, inches[0] * columns)
    figure, grid = pyplot().subplots(
        rows, columns, figsize=(width, inches[1] * rows + 0.6), squeeze=False
    )
    figure.suptitle(fill(title, int(13 * width)), x=0.01, ha="left")
    for axes in list(grid.flat)[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(grid.flat, names, strict=False):
        axes.set_title(name, fontsize="medium")
        draw(axes, name)
    shown = [axes for axes in grid.flat[: len(names)] if axes.get_legend_handles_labels()[1]]
    labels = {tuple(axes.get_legend_handles_labels()[1]) for axes in shown}
    if len(shown) == len(names) > 1 and len(labels) == 1:
        figure.legend(
            *shown[0].get_legend_handles_labels(), loc="outside right center", frameon=False
        )
    else:
        for axes in shown:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    if label:
        for row in grid:
            row[0].set_ylabel(label)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot().close(figure)
    return path


def draw_curve(
    axes: Axes, tokens: np.ndarray, values: np.ndarray, color: Any, label: str | None = None
) -> None:
    """Draw a noisy series faintly, and its running mean on top."""
    axes.plot(tokens, values, color=color, alpha=0.25, linewidth=0.8)
    marker = "o" if len(tokens) == 1 else None  # a line of a single point is invisible
    axes.plot(tokens, smoothed(values), color=color, linewidth=1.6, label=label, marker=marker)


def depth_colors(count: int) -> list[Any]:
    """Return a colour per recurrent step, light for shallow; beyond six steps, some are grey."""
    import matplotlib as mpl

    if count == 1:
        return [COLORS[0]]  # the lightest colour hardly shows on white
    shown = np.linspace(0, count - 1, min(count, len(COLORS))).round()
    colors = mpl.colormaps["viridis_r"](np.linspace(0.12, 0.95, count))
    return [color if index in shown else GREY for index, color in enumerate(colors)]


def series_colors(names: Sequence[str]) -> dict[str, str]:
    """Return name → colour; the seventh name and all later ones are grey."""
    return dict(zip(names, [*COLORS, *[GREY] * len(names)], strict=False))


def steps_with(records: Records, prefix: str) -> list[int]:
    """Return the recurrent steps r, sorted, for which some record has the key `prefix` + r."""
    keys = {key for record in records for key in record if key.startswith(prefix)}
    return sorted(int(key.removeprefix(prefix)) for key in keys)


def series(records: Records, key: str) -> np.ndarray:
    """Return one value per record, NaN where it is missing or null."""
    return np.array([record.get(key) for record in records], dtype=np.float64)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return a centred running mean over 5 % of the records; it skips NaN, which stays NaN."""
    half = len(values) // 40
    windows = (values[max(i - half, 0) : i + half + 1] for i in range(len(values)))
    means = [np.nan if np.isnan(w).all() else float(np.nanmean(w)) for w in windows]
    return np.where(np.isnan(values), np.nan, means)


def last(values: np.ndarray) -> float:
    """Return the last value of the running mean; NaN if there are no values."""
    seen = smoothed(values)[~np.isnan(values)]
    return float(seen[-1]) if len(seen) else np.nan


def show_the_bulk(axes: Axes, values: np.ndarray) -> None:
    """Cut off the steep fall early in training, so that later differences can be seen."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return
    low, high = float(finite.min()), float(np.quantile(finite, 0.9))
    if high > low:
        axes.set_ylim(low - 0.05 * (high - low), high + 0.35 * (high - low))


def token_axis(axes: Axes, tokens: np.ndarray) -> None:
    """Label the horizontal axis with tokens read, such as 1.5 M."""
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel("tokens read")
    if tokens[0] < tokens[-1]:
        axes.set_xlim(tokens[0], tokens[-1] + 0.02 * (tokens[-1] - tokens[0]))
    axes.xaxis.set_major_formatter(EngFormatter())
