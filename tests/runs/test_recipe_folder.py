"""A recipe's folder stands for its newest stage wherever a run is looked at."""

import logging
import os
from pathlib import Path

import pytest

from titan_loop.runs.recipe_folder import chosen_run
from titan_loop.runs.status import PlannedStage, write_plan


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_plan(tmp_path, "mine", [PlannedStage(name, None, 10) for name in ("1a", "1b", "gate")])
    for age, name in enumerate(("1a", "1b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("")
        os.utime(tmp_path / name / "metrics.jsonl", (1e9 - age, 1e9 - age))
    return tmp_path


def test_the_stage_trained_last_or_the_one_named(recipe: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        assert chosen_run(recipe, None) == recipe / "1a"
    assert f"{recipe} has the stages 1b, 1a: taking 1a; --stage takes another" in caplog.text
    caplog.clear()
    assert chosen_run(recipe, "1b") == recipe / "1b"
    assert not caplog.text
    assert chosen_run(recipe / "1a", None) == recipe / "1a"
