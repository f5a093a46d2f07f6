"""Small runs of every family on a generated task, which break off on demand."""

from pathlib import Path
from typing import Any

import pytest

from tests.contracts.families import cases
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.mano import Mano
from titan_loop.models.family import ModelOptions
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.callback import Callback
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

WINDOW, WINDOWS = 32, 8
BATCH = WINDOW * WINDOWS
BREAKS_AT = 3


def small_run(folder: Path, model: ModelOptions, *, steps: int = 6) -> LoopTrainer.Config:
    """Return a run of `steps` steps with a checkpoint every other step."""
    config = LoopTrainer.Config(
        dump_folder=str(folder),
        total_tokens=steps * BATCH,
        model=model,
        dataloader=TaskLoader.Config(task=Mano(5, 3)),
        learning_rate=Schedule.constant(1e-3),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(BATCH)),
    )
    config.training.seq_len = WINDOW
    config.training.local_batch_size = 2
    config.checkpoint.interval = 2
    config.metrics.log_freq = 1
    return config


def train(name: str, folder: Path, world: int, breaks: bool = False) -> None:
    """Train a case on `world` ranks; all break off after step `BREAKS_AT` if asked, and save
    nothing: the processes stay for the next case.
    """
    # Environments of transformers import this module, and have no datatrove.
    from tests.support.tiny import act_as_launched, train_run

    class Breaks(Callback):
        def on_step_end(self, trainer: Any, metrics: Any) -> None:
            if breaks and trainer.step == BREAKS_AT:
                raise RuntimeError("broken off")

    act_as_launched(world)
    config = cases("runs")[name].config(folder, world)
    train_run(config, callbacks=[Breaks()])


def whole_run(name: str, folders: pytest.TempPathFactory) -> Path:
    """Return the run of a case that was never stopped; trained once, for tests that only read it.

    The test must use the fixture `alone`.
    """
    folder = folders.getbasetemp() / f"whole-{name.replace('/', '-')}"
    if not folder.exists():
        train(name, folder, 1)
    return folder


def records(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of a run by step."""
    return {record["step"]: record for record in RunDirectory(folder).read_metrics()}
