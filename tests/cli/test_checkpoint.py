"""`titan-loop checkpoint`: what it prints, what it refuses, and its exit codes."""

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.checkpoint.small_checkpoint import content, flip_a_bit
from tests.support.command_lines import refused
from titan_loop.checkpoint.choosing import newest_good
from titan_loop.checkpoint.folders import read_tags
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.checkpoint.tensors import write_checkpoint
from titan_loop.cli import main as cli

STEPS = (2, 4, 6)


def entries(step: int) -> dict[str, Any]:
    return {
        "layers.0.w": torch.arange(12.0).reshape(3, 4),
        "layers.0.b": torch.full((3,), float(step)).bfloat16(),
        "count": torch.tensor([1, 2], dtype=torch.int64),
        "optimizer.state.layers.0.w.exp_avg": torch.ones(3, 4) * step,
        "optimizer.param_groups.layers.0.w.lr": 0.5 / step,
    }


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Return the checkpoints of a run that keeps every fourth step: 2, 4 and 6, and half of 8."""
    run = tmp_path / "run"
    folder = run / "checkpoints"
    for step in STEPS:
        write_checkpoint(folder / f"step-{step}", entries(step), content(step))
    (folder / "step-8").mkdir()
    (folder / "step-8" / "__0_0.distcp").write_bytes(b"half")
    (run / "run.json").write_text(json.dumps({"format_version": 1}))
    config = {"checkpoint": {"folder": "checkpoints", "keep_every": 4}}
    (run / "config.json").write_text(json.dumps(config))
    return folder


class Answer(NamedTuple):
    code: int
    out: str


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]):
    def call(*arguments: Any) -> Answer:
        code = cli.main(["checkpoint", *map(str, arguments)])
        return Answer(code, capsys.readouterr().out)

    return call


@pytest.fixture
def error(capsys: pytest.CaptureFixture[str]):
    return partial(refused, capsys, "checkpoint")


def test_ls_shows_every_folder(checkpoints, call):
    call("tag", checkpoints / "step-2", "paper")
    (checkpoints / "step-6" / "__0_0.distcp").unlink()
    (checkpoints / "step-6").rename(checkpoints / "damaged-step-6")
    answer = call("ls", checkpoints.parent)
    header, *rows = answer.out.splitlines()
    assert header.split() == ["step", "tokens", "R", "size", "when", "kept", "state"]
    assert [row.split()[0] for row in rows] == ["2", "4", "6", "8"]
    assert rows[0].split()[1:3] == ["2,000", "4"]
    assert "2026-11-21T12:00:02+00:00  tag paper  good" in rows[0]
    assert "every 4    good" in rows[1]
    assert "damaged (set aside): __0_0.distcp is missing" in rows[2]
    assert rows[3].endswith("unfinished")
    assert call("ls", checkpoints).out == answer.out
    assert answer.code == 0


def test_verify_names_every_fault(checkpoints, call):
    answer = call("verify", checkpoints.parent)
    assert answer.code == 0
    assert "step-6: good" in answer.out
    assert "step-8: unfinished" in answer.out
    assert "4 looked at, 0 damaged" in answer.out
    flip_a_bit(checkpoints / "step-2" / "__0_0.distcp")
    (checkpoints / "step-2" / "tensors.json").unlink()
    (checkpoints / "step-4" / "manifest.json").write_text("{ torn")
    answer = call("verify", checkpoints.parent)
    assert answer.code == 1
    assert "4 looked at, 2 damaged" in answer.out
    line = next(line for line in answer.out.splitlines() if line.startswith("step-2: damaged"))
    assert "tensors.json is missing" in line
    assert "__0_0.distcp has a different SHA-256" in line
    assert call("verify", checkpoints / "step-6").code == 0
    assert call("verify", checkpoints / "step-4").code == 1


def test_diff(checkpoints, call):
    answer = call("diff", checkpoints / "step-2", checkpoints / "step-4")
    assert answer.code == 1
    assert answer.out.splitlines() == [
        "manifest created: '2026-11-21T12:00:02+00:00' | '2026-11-21T12:00:04+00:00'",
        "manifest data.windows_consumed: 2 | 4",
        "manifest step: 2 | 4",
        "manifest trainer.step: 2 | 4",
        "manifest trainer.tokens: 2000 | 4000",
        "layers.0.b: largest difference 2",
        "optimizer.param_groups.layers.0.w.lr: 0.25 | 0.125",
        "optimizer.state.layers.0.w.exp_avg: largest difference 2",
        "8 differences, 5 entries in both",
    ]
    same = call("diff", checkpoints.parent, checkpoints / "step-6")
    assert (same.code, same.out) == (0, "0 differences, 5 entries in both\n")


def test_a_copied_or_renamed_folder_is_not_good(checkpoints, call):
    """No run loads one, so the newest good one is what a run would load."""
    shutil.copytree(checkpoints / "step-6", checkpoints / "step-10")
    (checkpoints / "step-4").rename(checkpoints / "step-12")
    for verb in ("ls", "verify"):
        lines = call(verb, checkpoints.parent).out.splitlines()
        states = [line for line in lines if "manifest.json belongs to step" in line]
        assert ["damaged" in state for state in states] == [True, True]
    assert call("verify", checkpoints / "step-10").code == 1
    found = newest_good(checkpoints)
    assert found is not None
    assert found[0] == 6


def test_tag(checkpoints, call, error):
    checkpoint = checkpoints / "step-2"
    assert call("tag", checkpoint, "paper").out == f"{checkpoint}: paper\n"
    assert read_tags(checkpoint) == ["paper"]
    assert "no tag 'peper'" in error("tag", checkpoint, "peper", "--remove")
    assert call("tag", checkpoint, "paper", "--remove").out == f"{checkpoint}: no tags\n"
    assert "' ' is empty" in error("tag", checkpoint, " ")
    assert "not text" in error("tag", checkpoint, os.fsdecode(b"\xff"))
    assert "no manifest.json" in error("tag", checkpoints / "step-8", "x")
    read_manifest(checkpoint)


def test_mistakes(checkpoints, error, tmp_path):
    assert "nearest: verify" in error("verifies")
    assert "has no checkpoints; give one of run in it" in error("ls", tmp_path)
    assert "no manifest.json" in error("diff", checkpoints, checkpoints / "step-2")
    flip_a_bit(checkpoints / "step-2" / "__0_0.distcp")
    assert "different SHA-256" in error("diff", checkpoints / "step-2", checkpoints / "step-4")
