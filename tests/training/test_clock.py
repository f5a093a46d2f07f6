"""Clocks that are set back or ahead change neither what is trained nor which checkpoint is used."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import tiny_config, train_run
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.callback import Callback
from titan_loop.training.trainer import LoopTrainer

YEARS = 10 * 365 * 86_400.0
pytestmark = pytest.mark.usefixtures("alone")


class SetClock(Callback):
    """Sets the clock ten years back after the second step and ahead after the fourth."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.real = time.time

    def on_step_end(self, trainer: LoopTrainer, metrics: Mapping[str, Any]) -> None:
        if trainer.step in (2, 4):
            off = -YEARS if trainer.step == 2 else YEARS
            self.monkeypatch.setattr(time, "time", lambda: self.real() + off)


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in RunDirectory(run).read_metrics()]


def test_clocks_and_dates_change_no_number(source, tmp_path, monkeypatch):
    train_run(tiny_config(source, tmp_path / "right"))
    config = tiny_config(source, tmp_path / "jumps")
    config.callbacks = (SetClock(monkeypatch),)
    config.training.steps = 4
    train_run(config)
    checkpoints = tmp_path / "jumps" / "checkpoints"
    for step, when in ((4, time.time() - YEARS), (2, time.time() + YEARS)):
        for path in (checkpoints / f"step-{step}", *(checkpoints / f"step-{step}").iterdir()):
            os.utime(path, (when, when))
    train_run(tiny_config(source, tmp_path / "jumps"))
    assert losses(tmp_path / "jumps") == losses(tmp_path / "right")
    records = RunDirectory(tmp_path / "jumps").read_metrics()
    assert all(record["tokens_per_second"] > 0 for record in records)
