"""Files of a recipe's jobs: their numbers, and the history of their starts."""

import pytest

from titan_loop.errors import UserError
from titan_loop.launch.record import (
    Restarts,
    newest_checkpoints,
    read_jobs,
    read_restarts,
    write_jobs,
    write_restarts,
)


def test_restarts_count_while_no_checkpoint_comes(tmp_path):
    restarts = Restarts(bad_nodes={"n1": "gone"})
    restarts.begin({}, is_restart=True)
    restarts.begin({}, is_restart=True)
    assert restarts.fruitless == 2
    restarts.begin({"1a": 5}, is_restart=True)  # a first one is progress
    assert restarts.fruitless == 0
    restarts.begin({"1a": 5}, is_restart=True)
    write_restarts(tmp_path, "1a", restarts)
    read = read_restarts(tmp_path, "1a")
    assert (read.fruitless, read.bad_nodes) == (1, {"n1": "gone"})
    read.begin({"1a": 5}, is_restart=False)  # submitted anew
    assert read == Restarts(checkpoints={"1a": 5})
    assert read_restarts(tmp_path, "1b") == Restarts()


def test_newest_checkpoints_of_a_recipe_or_a_stage(tmp_path):
    for run, step in (("1a", 9), ("1a", 10), ("1b", 3)):
        manifest = tmp_path / run / "checkpoints" / f"step-{step}" / "manifest.json"
        manifest.parent.mkdir(parents=True)
        manifest.touch()
    (tmp_path / "1b" / "checkpoints" / "step-4").mkdir()  # never finished
    assert newest_checkpoints(tmp_path, None) == {"1a": 10, "1b": 3}
    assert newest_checkpoints(tmp_path, "1b") == {"1b": 3}


def test_jobs_of_another_version_are_refused(tmp_path):
    write_jobs(tmp_path, {"1a": "7", "1b": "8"})
    assert read_jobs(tmp_path) == {"1a": "7", "1b": "8"}
    (tmp_path / "slurm" / "jobs.json").write_text('{"format_version": 99}')
    with pytest.raises(UserError, match="format version 99"):
        read_jobs(tmp_path)
