"""The loss of a whole recipe in one plot: its tree of stages laid along the tokens."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titan_loop.analysis.drawing import (
    Axes,
    draw_axes,
    draw_curve,
    series,
    show_the_bulk,
    token_axis,
)
from titan_loop.errors import UserError
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.status import StageStatus, read_status

_BRANCH_COLORS = ("Blues", "Oranges", "Greens", "Purples")


class StageCurve(NamedTuple):
    """Records of one stage of a recipe, and the global tokens that its ancestors consumed."""

    name: str
    start_tokens: int
    records: Sequence[Mapping[str, Any]]


def plot_stages(folder: Path) -> Path:
    """Draw `plots/loss.png` of a recipe's folder and return its path."""
    branches = [
        branch
        for root in read_status(folder)
        for branch in _branches(folder, root, start_tokens=0)
        if branch
    ]
    if not branches:
        raise UserError(f"no stage in {folder} has records; train one before plotting it")
    return plot_recipe(branches, folder / "plots" / "loss.png")


def _branches(folder: Path, stage: StageStatus, *, start_tokens: int) -> Iterator[list[StageCurve]]:
    """Yield the branch from a stage down its first children, then the branches forked from it."""
    branch: list[StageCurve] = []
    forks: list[tuple[StageStatus, int]] = []
    following: StageStatus | None = stage
    while following is not None:
        records = RunDirectory(folder / following.name).read_metrics()
        if records:
            branch.append(StageCurve(following.name, start_tokens, records))
            start_tokens += records[-1]["tokens"]
        first, *others = following.children or [None]
        forks.extend((fork, start_tokens) for fork in others if fork is not None)
        following = first
    yield branch
    for fork, start in forks:
        yield from _branches(folder, fork, start_tokens=start)


def plot_recipe(
    branches: Sequence[Sequence[StageCurve]], path: Path, *, boundaries: bool = False
) -> Path:
    """Draw the last recurrent step's cross entropy over all stages of a recipe.

    Args:
        branches: For every branch the stages that no earlier branch has, each with at least one
            record. A branch has one colour, from light to dark along its stages.
        boundaries: Whether a dashed line marks the beginning of each stage.
    """

    def draw(axes: Axes) -> None:
        import matplotlib as mpl

        everything: list[np.ndarray] = []
        most = 0.0
        for number, branch in enumerate(branches):
            color_map = _BRANCH_COLORS[number % len(_BRANCH_COLORS)]
            colors = mpl.colormaps[color_map](np.linspace(0.45, 0.95, len(branch)))
            for stage, color in zip(branch, colors, strict=True):
                tokens = stage.start_tokens + series(stage.records, "tokens")
                last = [r.get(f"ce/step_{r['recurrent_steps']}") for r in stage.records]
                losses = np.array(last, dtype=np.float64)  # null becomes NaN
                draw_curve(axes, tokens, losses, color, label=stage.name)
                if boundaries and stage.start_tokens:
                    axes.axvline(stage.start_tokens, color="0.5", linestyle="--", linewidth=1.0)
                everything.append(losses)
                most = max(most, float(tokens[-1]))
        show_the_bulk(axes, np.concatenate(everything))
        axes.set_title("Training loss after the last recurrent step, stage by stage")
        axes.set_ylabel("cross entropy (nats per token)")
        axes.figure.legend(loc="outside right upper")
        token_axis(axes, np.array([0.0, most]))
        axes.set_xlabel("tokens read since the first stage began")

    return draw_axes(draw, path)
