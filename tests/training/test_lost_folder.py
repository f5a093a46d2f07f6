"""A run that loses its folder saves where the folder is now and stops; nothing is lost or mixed."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import BATCH_WINDOWS, tiny_config, train_run
from titan_loop.checkpoint.listing import list_checkpoints
from titan_loop.errors import UserError
from titan_loop.runs.run_directory import LOCK, RunDirectory
from titan_loop.storage import folder_lock
from titan_loop.storage.folder_lock import FolderLock, LostFolder
from titan_loop.training import lost_folder
from titan_loop.training.callback import Callback
from titan_loop.training.trainer import LoopTrainer

pytestmark = pytest.mark.usefixtures("alone")


class At(Callback):
    """A callback that does something after one step."""

    def __init__(self, step: int, act: Callable[[], object], *, heard: bool = True) -> None:
        self.step = step
        self.act = act
        self.heard = heard

    def on_step_end(self, trainer: LoopTrainer, metrics: Mapping[str, Any]) -> None:
        if trainer.step == self.step:
            self.act()
            while self.heard and not trainer.asked_to_stop:
                time.sleep(0.001)

    def on_train_end(self, trainer: LoopTrainer) -> None:
        assert not self.heard, "the run should have stopped before its end"


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(folder_lock, "_LOOK_AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(lost_folder, "LOOK_SECONDS", 0.001)


def stopped(source: Path, run: Path, act: Callable[[], object], *, steps: int = 4) -> str:
    config = tiny_config(source, run, steps=steps)
    config.checkpoint.interval = 100
    config.training.local_batch_size = BATCH_WINDOWS
    config.callbacks = (At(2, act),)
    with pytest.raises(UserError) as caught:
        train_run(config)
    return str(caught.value)


def good_steps(run: Path) -> list[int]:
    listed = list_checkpoints(run / "checkpoints", hashes=True)
    assert all(checkpoint.good for checkpoint in listed)
    return [checkpoint.step for checkpoint in listed]


@pytest.mark.parametrize("steps", [4, 3], ids=["before the end", "at the last step"])
def test_a_deleted_lock_ends_the_run_after_a_save(source, tmp_path, steps):
    run = tmp_path / "run"
    message = stopped(source, run, (run / LOCK).unlink, steps=steps)
    assert "run.lock was deleted while it was in use" in message
    assert good_steps(run) == [3]
    train_run(tiny_config(source, run, steps=4))
    assert good_steps(run)[-1] == 4


def test_a_renamed_folder_gets_the_last_save_and_is_not_made_anew(source, tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"
    message = stopped(source, run, lambda: run.rename(moved))
    assert f"{run} was renamed to {moved}" in message
    assert not run.exists()
    assert good_steps(moved) == [3]
    assert [record["step"] for record in RunDirectory(moved).read_metrics()] == [1, 2]


def test_a_folder_that_another_run_took_is_left_alone(source, tmp_path):
    run = tmp_path / "run"

    def replace() -> None:
        (run / LOCK).unlink()
        (run / LOCK).touch()

    message = stopped(source, run, replace)
    assert "run.lock was replaced: another process may work there" in message
    assert good_steps(run) == []


def test_a_stalled_server_stalls_no_training_step(source, tmp_path, monkeypatch):
    """Only saves look by themselves; they need the server in any case."""
    looks, stalled, over, lost = [], threading.Event(), threading.Event(), FolderLock.lost

    def look(lock: FolderLock) -> LostFolder | None:
        looks.append(threading.current_thread().name)
        if looks[-1] == "folder-watch":
            stalled.set()
            over.wait()
        return lost(lock)

    monkeypatch.setattr(FolderLock, "lost", look)
    config = tiny_config(source, tmp_path / "run", steps=2)
    config.checkpoint.interval = 100
    config.callbacks = (At(1, lambda: stalled.wait(60), heard=False),)
    train_run(config)
    over.set()
    assert looks.count("folder-watch") == 1
    assert len(looks) == 2  # of the save at the end


def test_a_failing_disk_is_no_loss(tmp_path, monkeypatch):
    lock = RunDirectory(tmp_path / "run").lock()

    def stat(path: Path, **options: Any) -> os.stat_result:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", stat)
        assert lock.lost() is None
    assert lock.lost() is None
    (tmp_path / "run" / LOCK).unlink()
    assert lock.lost() is not None
    lock.release()
