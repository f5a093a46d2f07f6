"""Training steps that a curriculum took until it passed the exam of each number of hops.

Source: recurrent-depth transformers, arXiv 2604.07822, §6.2 and Figure 6: 1.3 million updates until
four hops are learned, then few more for each further hop.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from titan_loop.analysis.drawing import COLORS, draw_axes
from titan_loop.data.tasks.task import Task
from titan_loop.evaluation.evals_log import EVALS_FIELDS, PROMOTION
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_jsonl

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def updates_to_learn(run: RunDirectory, task: Task, levels: int) -> dict[str, int]:
    """Return stratum → training steps until its exam was passed, for the passed `levels`.

    A level's last exam is the one that it passed. Where a run went back and repeated exams, the
    later ones count.
    """
    asked: dict[str, int] = {}
    for record in read_jsonl(run.evals_jsonl, EVALS_FIELDS):
        if record["asked"] == PROMOTION:
            asked |= {name.split("/")[1]: record["step"] for name in record["results"]}
    passed = [name for level in range(levels) for name in task.level_strata(level)]
    return {name: asked[name] for name in passed if name in asked}


def draw_updates(updates: Mapping[str, int], path: Path) -> Path:
    """Draw training steps against strata, which the curriculum passed in this order."""

    def draw(axes: "Axes") -> None:
        axes.plot(range(len(updates)), [*updates.values()], "o-", color=COLORS[0])
        axes.set_xticks(range(len(updates)), updates, rotation=45, ha="right")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("training steps until the exam is passed")

    first, last = min(updates.values()), max(updates.values())
    title = f"The first exam takes {first:,} training steps"
    if len(updates) > 1:
        title += f", each further one {(last - first) / (len(updates) - 1):,.0f} on average"
    return draw_axes(draw, path, title=title)
