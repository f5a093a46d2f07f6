"""A start with other settings than the last one says so, one line a field, and has them."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import BATCH_TOKENS, tiny_config, train_run
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.errors import UserError
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.callback import Callback
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer


class Decays(Callback):
    """Notes the weight decays of the optimiser."""

    def __init__(self) -> None:
        self.found: set[float] = set()

    def on_train_start(self, trainer: Any) -> None:
        for optimizer in trainer.optimizers:
            self.found |= {group["weight_decay"] for group in optimizer.param_groups}


@pytest.mark.usefixtures("alone")
def test_one_line_a_field(source: Path, tmp_path: Path):
    def started(limit: int, *callbacks: Callback) -> LoopTrainer.Config:
        config = tiny_config(source, tmp_path / "run", steps=4)
        config.training.steps, config.callbacks = limit, callbacks
        config.training.max_norm = math.inf  # null in JSON, and no change
        return config

    train_run(started(2))
    other = started(0)
    other.optimizer.name = "muon"
    with pytest.raises(UserError, match="muon cannot go on with the moments of adamw; use that"):
        train_run(other)
    child = tiny_config(source, tmp_path / "child")
    child.optimizer.name, child.checkpoint.carry.parent = "muon", str(tmp_path / "run")
    with pytest.raises(UserError, match=r"muon cannot go .* of adamw; use that, or start without"):
        train_run(child)
    assert not (tmp_path / "child" / "config.json").exists()
    decays = Decays()
    config = started(0)
    config.learning_rate = Schedule.parse("0:0 linear 1K:1e-3")
    config.recurrence = RecurrenceConfig(steps=Schedule.constant(3))
    config.batch.global_batch_tokens = Schedule.constant(BATCH_TOKENS // 2)
    config.adamw.weight_decay, config.debug.seed = 0.5, 7
    train_run(config, callbacks=[decays])
    log = RunDirectory(tmp_path / "run").log_txt.read_text().splitlines()
    lines = [line.partition("since the last start: ")[2] for line in log]
    changed = dict(line.split(maxsplit=1) for line in lines if line)
    assert changed.pop("training.steps") == "2 → 0"
    assert changed.pop("debug.seed") == "0 → 7"
    assert changed.pop("learning_rate").endswith("→ '0:0 linear 1K:0.001'")
    assert changed.pop("recurrence.steps") == "'0:4 constant 512:2' → '3'"
    assert changed.pop("batch.global_batch_tokens") == "'256' → '128'"
    assert changed.pop("adamw.weight_decay") == "0.1 → 0.5"
    assert [*changed] == ["callbacks"]
    assert decays.found == {0.0, 0.5}  # the checkpoint does not bring back the old one
    last = CheckpointReader(RunDirectory(tmp_path / "run").checkpoint(6)).keys()
    assert not any("param_groups" in key for key in last)
