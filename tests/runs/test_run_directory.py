"""Run directories: created, reopened, refused, and read back after a kill."""

import json
import math
from pathlib import Path

import pytest

from titan_loop.errors import UserError
from titan_loop.runs.run_directory import FORMAT_VERSION, RunDirectory
from titan_loop.storage.json_files import append_jsonl, read_jsonl


def test_create_then_reopen(tmp_path: Path):
    run = RunDirectory(tmp_path / "a" / "run")
    created = run.create_or_open(["titan-loop", "train"], {"lr": math.inf, "path": "é"})
    assert created["format_version"] == FORMAT_VERSION
    assert created["restarts"] == []
    assert {"titan_loop", "python", "torch", "torchtitan"} <= created["versions"].keys()
    assert json.loads(run.config_json.read_text()) == {"lr": None, "path": "é"}
    reopened = run.create_or_open(["titan-loop", "train", "--resume"])
    assert reopened["created"] == created["created"]
    assert reopened["command"] == created["command"]
    assert [restart["command"][-1] for restart in reopened["restarts"]] == ["--resume"]
    assert sorted(p.name for p in run.path.iterdir()) == ["config.json", "run.json"]


def test_parent_that_is_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "run", tmp_path / "file"):
        with pytest.raises(UserError, match="cannot be written") as caught:
            RunDirectory(path).create_or_open([])
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("run.json", json.dumps({"format_version": FORMAT_VERSION + 1}), "; upgrade titan_loop"),
        ("run.json", "[]", r"run\.json is damaged .*; choose another run directory"),
    ],
)
def test_what_cannot_be_read_is_refused_and_stays(tmp_path: Path, name, text, complaint):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=complaint):
        RunDirectory(tmp_path).create_or_open([], {})
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, text)]


def test_a_folder_without_its_files_is_not_a_run(tmp_path: Path):
    with pytest.raises(UserError, match=r"not a run directory.*; give the folder of a run"):
        RunDirectory(tmp_path).read_run()
    RunDirectory(tmp_path / "1a").create_or_open([])
    with pytest.raises(UserError, match=r"not a run directory.*; give one of 1a in it"):
        RunDirectory(tmp_path).read_run()
    with pytest.raises(UserError, match=r"has no config\.json"):
        RunDirectory(tmp_path).read_config()


def test_restart_supersedes_repeated_steps(tmp_path: Path):
    run = RunDirectory(tmp_path)
    # Killed after step 40, restarted from 20 with another logging interval, killed again at 35.
    for attempt, steps in (("a", (10, 20, 30, 40)), ("b", (25, 35)), ("c", (30,))):
        for step in steps:
            append_jsonl(run.metrics_jsonl, {"step": step, "tokens": 8, "attempt": attempt})
    series = [(record["step"], record["attempt"]) for record in run.read_metrics()]
    assert series == [(10, "a"), (20, "a"), (25, "b"), (30, "c")]
    assert len(read_jsonl(run.metrics_jsonl)) == 7
