"""The loss of a whole recipe in one plot: its tree of stages laid along the tokens.

recipe.json, every stage's metrics.jsonl ─► branches, each from where it forks ─► loss.png
"""

from collections.abc import Iterator
from pathlib import Path

from titan_loop.analysis.plots import StageCurve, plot_recipe
from titan_loop.errors import UserError
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.status import StageStatus, read_status


def plot_stages(folder: Path) -> Path:
    """Draw `plots/loss.png` of a recipe's folder and return its path.

    Raises:
        UserError: It is no recipe's folder, or no stage has logged anything.
    """
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
    """Yield the branch that a stage begins, down its first children, then those forked from it."""
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
