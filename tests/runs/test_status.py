"""The tree of stages and forks, from the files that runs leave."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.holder import held
from titan_loop.checkpoint.manifest import write_manifest
from titan_loop.errors import UserError
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.status import (
    PlannedStage,
    read_status,
    status_lines,
    write_plan,
)
from titan_loop.storage.json_files import append_jsonl


def stage(name: str, parent: str | None = None) -> PlannedStage:
    return PlannedStage(name, parent, total_tokens=1000)


def run(path: Path, tokens: int, *, saved: int, parent: str = "", total: int = 1000) -> None:
    """Leave what a run leaves: its config, its last record, its last checkpoint."""
    config: dict[str, Any] = {
        "total_tokens": total,
        "checkpoint": {"folder": "checkpoints", "carry": {"parent": parent}},
    }
    directory = RunDirectory(path)
    directory.create_or_open(["test"], config=config)
    record = {"step": 1, "tokens": tokens, "loss": 2.5, "tokens_per_second": 4.0}
    append_jsonl(directory.metrics_jsonl, record)
    if saved:
        trainer = {"step": 1, "tokens": saved, "recurrent_steps": 4, "architecture": {}}
        content = {"step": 1, "trainer": trainer, "data": {}, "lineage": {}, "files": {}}
        write_manifest(directory.checkpoint(1), content)


@pytest.fixture
def recipe_folder(tmp_path: Path) -> Path:
    stages = [stage("1a"), stage("1b", "1a"), stage("2.6b", "1a"), stage("annealing", "1b")]
    write_plan(tmp_path, "mine", stages)
    run(tmp_path / "1a", 1000, saved=1000)
    run(tmp_path / "1b", 520, saved=500, parent="1a")
    run(tmp_path / "trial", 10, saved=0, parent=str(tmp_path / "1a" / "checkpoints" / "step-1"))
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell who holds a lock")
def test_the_tree_says_how_far_everything_is(recipe_folder):
    with held(recipe_folder / "1b"):
        lines = status_lines(read_status(recipe_folder))
    assert lines == [
        "1a               complete, 1,000 tokens, loss 2.5000",
        "├─ 1b            52.0% of 1,000 tokens, loss 2.5000, about 2m00s left",
        "│  └─ annealing  not begun from 1b, 1,000 tokens",
        "├─ 2.6b          not begun from 1a, 1,000 tokens",
        "└─ trial         1.0% of 1,000 tokens, loss 2.5000, not running, not of the recipe",
        f"next: titan-loop train {recipe_folder}/1b",
    ]
    _, ended, *_ = status_lines(read_status(recipe_folder))
    assert ended == "├─ 1b            52.0% of 1,000 tokens, loss 2.5000, not running"


def test_a_run_whose_last_loss_is_not_finite_has_begun(tmp_path):
    run(tmp_path, 520, saved=500)
    last = {"step": 2, "tokens": 600, "loss": math.nan, "tokens_per_second": 4.0}
    append_jsonl(RunDirectory(tmp_path).metrics_jsonl, last)
    assert "60.0% of 1,000 tokens" in status_lines(read_status(tmp_path))[0]


@pytest.mark.parametrize("name", ["best", "step-1"])
def test_a_fork_from_a_linked_checkpoint_stands_below_its_run(recipe_folder, tmp_path, name):
    checkpoints = recipe_folder / "1a" / "checkpoints"
    kept = (checkpoints / "step-1").rename(tmp_path / "archived")
    (checkpoints / name).symlink_to(kept)
    if name == "best":
        run(recipe_folder / "trial", 10, saved=0, parent=str(checkpoints / name))
    lines = status_lines(read_status(recipe_folder))
    assert lines[-2].startswith("└─ trial ")


def test_a_complete_stage_that_the_recipe_now_trains_for_longer_goes_on(recipe_folder):
    write_plan(recipe_folder, "mine", [PlannedStage("1a", None, 4000)], flags=["--x"])
    first, *_, following = status_lines(read_status(recipe_folder))
    assert first.startswith("1a        25.0% of 4,000 tokens, loss 2.5000, not running")
    assert following == f"next: titan-loop train mine --dump-folder {recipe_folder} --x"


def test_a_stage_without_a_whole_checkpoint_says_so_on_its_line(recipe_folder):
    (RunDirectory(recipe_folder / "1b").checkpoint(1) / "manifest.json").write_text("{ torn")
    first, damaged, *rest, following = status_lines(read_status(recipe_folder))
    assert first.endswith("complete, 1,000 tokens, loss 2.5000")
    assert damaged.startswith("├─ 1b            no checkpoint in ")
    assert "is usable (step-1: " in damaged
    assert len(rest) == 3
    assert following == f"next: titan-loop train {recipe_folder}/1b"


def test_what_is_neither_run_nor_recipe_is_refused(tmp_path, recipe_folder):
    with pytest.raises(UserError, match="is not a folder"):
        read_status(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="neither a run nor a recipe's stages"):
        read_status(tmp_path / "empty")
    (recipe_folder / "recipe.json").write_text("{")
    with pytest.raises(UserError, match=r"recipe\.json is damaged"):
        read_status(recipe_folder)
