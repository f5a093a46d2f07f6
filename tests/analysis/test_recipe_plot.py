"""The plot of a recipe takes its stages from the tree: branches, and where each begins."""

from pathlib import Path
from typing import Any

import pytest

from titan_loop.analysis.recipe_plot import StageCurve, plot_stages
from titan_loop.errors import UserError
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.status import PlannedStage, write_plan
from titan_loop.storage.json_files import append_jsonl

TREE = {"1a": None, "1b": "1a", "annealing": "1b", "upcycled": "1a", "later": "upcycled"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    stages = [PlannedStage(name, parent, total_tokens=300) for name, parent in TREE.items()]
    write_plan(tmp_path, "mine", stages)
    return tmp_path


def train(folder: Path, name: str, tokens: int, recurrent_steps: int) -> None:
    run = RunDirectory(folder / name)
    config = {
        "total_tokens": 300,
        "checkpoint": {"folder": "checkpoints", "carry": {"parent": ""}},
    }
    run.create_or_open(["test"], config=config)
    for part in (1, 2):
        record: dict[str, Any] = {"step": part, "tokens": part * tokens // 2, "loss": 2.0}
        record |= {"tokens_per_second": 1.0, "recurrent_steps": recurrent_steps}
        record |= {f"ce/step_{r}": 3.0 / r for r in range(1, recurrent_steps + 1)}
        append_jsonl(run.metrics_jsonl, record)


def test_every_stage_is_drawn_once_from_where_its_parent_ended(folder, monkeypatch):
    with pytest.raises(UserError, match=r"no stage in .* has records"):
        plot_stages(folder)
    for name, tokens, steps in (("1a", 300, 4), ("1b", 200, 2), ("annealing", 100, 2)):
        train(folder, name, tokens, steps)
    train(folder, "upcycled", 80, 2)
    drawn: list[list[StageCurve]] = []
    monkeypatch.setattr(
        "titan_loop.analysis.recipe_plot.plot_recipe", lambda found, path: drawn.extend(found)
    )
    plot_stages(folder)
    assert [[(stage.name, stage.start_tokens) for stage in branch] for branch in drawn] == [
        [("1a", 0), ("1b", 300), ("annealing", 500)],
        [("upcycled", 300)],
    ]
    monkeypatch.undo()
    assert plot_stages(folder).read_bytes().startswith(b"\x89PNG")
