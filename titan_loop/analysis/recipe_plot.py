"""The loss of a whole recipe in one plot: its tree of stages laid along the tokens."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titan_loop.analysis import drawing
from titan_loop.analysis.drawing import Axes, last, series
from titan_loop.errors import UserError
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.status import StageStatus, read_status


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


def compare_losses(runs: Mapping[str, RunDirectory], path: Path) -> Path:
    """Draw the last recurrent step's cross entropy of named runs; return the plot's path."""
    branches = []
    for name, run in runs.items():
        if not (records := run.read_metrics()):
            raise UserError(f"{run.path} has no records; train it first")
        branches.append([StageCurve(name, 0, records)])
    return plot_recipe(branches, path)


def _branches(folder: Path, stage: StageStatus, *, start_tokens: int) -> Iterator[list[StageCurve]]:
    """Yield the branch from a stage down its first children, then the branches forked from it."""
    branch: list[StageCurve] = []
    forks: list[tuple[StageStatus, int]] = []
    following: StageStatus | None = stage
    while following is not None:
        if records := RunDirectory(folder / following.name).read_metrics():
            branch.append(StageCurve(following.name, start_tokens, records))
            start_tokens += records[-1]["tokens"]
        first, *others = following.children or [None]
        forks.extend((fork, start_tokens) for fork in others if fork is not None)
        following = first
    yield branch
    for fork, start in forks:
        yield from _branches(folder, fork, start_tokens=start)


def plot_recipe(branches: Sequence[Sequence[StageCurve]], path: Path) -> Path:
    """Draw the last recurrent step's cross entropy over all stages of a recipe.

    Args:
        branches: For every branch the stages that no earlier branch has, each with at least one
            record. A branch has one colour; its stages are named where they begin.
    """
    colors = drawing.series_colors([branch[-1].name for branch in branches])

    def draw(axes: Axes) -> None:
        everything: list[np.ndarray] = []
        begins: dict[int, list[str]] = {}
        most = 0.0
        for branch in branches:
            for stage in branch:
                tokens = stage.start_tokens + series(stage.records, "tokens")
                label = stage.name if stage is branch[-1] else None
                losses = _losses(stage)
                drawing.draw_curve(axes, tokens, losses, colors[branch[-1].name], label=label)
                everything.append(losses)
                begins.setdefault(stage.start_tokens, []).append(stage.name)
                most = max(most, float(tokens[-1]))
        drawing.show_the_bulk(axes, np.concatenate(everything))
        above = {"transform": axes.get_xaxis_transform(), "rotation": 30, "fontsize": 8}
        if [*begins] == [0]:  # whole runs, which the ends of their lines name
            begins.clear()
        for start, names in begins.items():
            axes.text(start, 1.01, ", ".join(names), **above)
        axes.set_ylabel("cross entropy after the last step (nats per token)")
        drawing.token_axis(axes, np.array([0.0, most]))
        if begins:
            axes.set_xlabel("tokens read since the first stage began")

    ends = [f"{last(_losses(branch[-1])):.3f} ({branch[-1].name})" for branch in branches]
    return drawing.draw_axes(draw, path, title=f"Training loss ends at {', '.join(ends)}")


def _losses(stage: StageCurve) -> np.ndarray:
    found = [record.get(f"ce/step_{record['recurrent_steps']}") for record in stage.records]
    return np.array(found, dtype=np.float64)  # null becomes NaN
