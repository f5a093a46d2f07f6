"""Hooks of callbacks: their order, their say in an update and a save, and their state."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tiny import BATCH_WINDOWS, tiny_config, train_run
from titan_loop.checkpoint.folders import committed_steps
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.callback import Callback, TrainingState
from titan_loop.training.trainer import LoopTrainer

pytestmark = pytest.mark.usefixtures("alone")

HOOKS = [name for name in vars(Callback) if not name.startswith("_")]


def recorder(calls: list[str]) -> Callback:
    """Return a callback that notes every call."""

    def noted(name: str) -> Any:
        def hook(self: Callback, *arguments: Any, **named: Any) -> Any:
            calls.append(name)
            return getattr(Callback, name)(self, *arguments, **named)

        return hook

    return type("Recorder", (Callback,), {name: noted(name) for name in HOOKS})()


def test_hooks_come_in_the_order_of_a_step(source: Path, tmp_path: Path):
    calls: list[str] = []
    config = tiny_config(source, tmp_path / "run", steps=2)
    config.training.steps = 1
    config.callbacks = (recorder(calls),)
    train_run(config)
    of_a_step = ["plan", "on_gradients", "judge", "on_update", "on_verdict", "record"]
    assert calls == ["on_train_start", *of_a_step, "on_step_end", "state_dict"]
    assert {*HOOKS} - {*calls} == {"may_save", "load_state_dict"}


class Veto(Callback):
    """Is against the third update, and against a save once the host knows."""

    def __init__(self) -> None:
        self.updated: dict[int, bool] = {}
        self.found: list[Any] = []

    def judge(self, trainer: TrainingState, loss: Tensor, grad_norm: Tensor) -> Tensor:
        return torch.tensor(trainer.step != 3)

    def on_verdict(self, trainer: TrainingState, trained: Any, *, updated: bool) -> None:
        self.updated[trained.step] = updated

    def record(self, trainer: TrainingState) -> Mapping[str, Any]:
        return {"veto/step": trainer.step}

    def may_save(self) -> bool:
        return [*self.updated.values()][-1]

    def state_dict(self) -> dict[str, Any]:
        return {"veto": [*self.updated]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.found = state["veto"]


def test_a_callback_can_veto_an_update_and_a_save_and_keeps_its_state(source: Path, tmp_path: Path):
    def config(limit: int, veto: Veto) -> LoopTrainer.Config:
        result = tiny_config(source, tmp_path / "run", steps=6)
        result.checkpoint.interval, result.training.steps = 1, limit
        result.training.local_batch_size = BATCH_WINDOWS
        result.callbacks = (veto,)
        return result

    first, second = Veto(), Veto()
    train_run(config(4, first))
    run = RunDirectory(tmp_path / "run")
    assert first.updated == {1: True, 2: True, 3: False, 4: True}
    assert committed_steps(run.checkpoints) == [1, 2, 4]
    assert read_manifest(run.checkpoint(4))["trainer"]["veto"] == [1, 2, 3, 4]
    assert [record["veto/step"] for record in run.read_metrics()] == [1, 2, 3, 4]
    train_run(config(0, second))
    assert second.found == [1, 2, 3, 4]
    assert [*second.updated] == [5, 6]
