"""The manager in a real run of one process: modes, fallback, keep policy, lineage, the lock."""

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.small_checkpoint import flip_a_bit
from tests.support.holder import held
from tests.support.tiny import BATCH_TOKENS, BATCH_WINDOWS, tiny_config, train_run
from titan_loop.checkpoint import saving
from titan_loop.checkpoint.folders import add_tag, committed_steps
from titan_loop.checkpoint.manifest import MANIFEST, read_manifest
from titan_loop.errors import UserError
from titan_loop.runs.run_directory import LOCK, RunDirectory
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

pytestmark = pytest.mark.usefixtures("alone")

STEPS = 6


def small_config(source: Path, run: Path, *, steps: int) -> LoopTrainer.Config:
    """Return a run of one layer and R = 2."""
    config = tiny_config(source, run, steps=steps)
    config.model.n_layers = 1
    config.recurrence.steps = Schedule.constant(2)
    return config


def train(source: Path, run: Path, steps: int = STEPS, **settings: Any) -> Path:
    config = small_config(source, run, steps=STEPS)
    config.training.steps = steps
    for name, value in settings.items():
        setattr(config.checkpoint, name, value)
    train_run(config)
    return run / "checkpoints"


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> Path:
    """A run without interruption, saved in the training thread."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(source, run)
    dist.destroy_process_group()
    return run


def tensor_hashes(checkpoints: Path) -> dict[int, str]:
    """Return the hash of the data file of every checkpoint: the tensors, to the last bit."""
    return {
        step: read_manifest(checkpoints / f"step-{step}")["files"]["__0_0.distcp"]["sha256"]
        for step in committed_steps(checkpoints)
    }


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_asynchronous_saves_write_the_same_bytes(source, whole, tmp_path, monkeypatch, mode):
    threads = set()
    real = saving.save

    def watched(*arguments: Any, **keywords: Any) -> Any:
        threads.add(threading.current_thread() is threading.main_thread())
        return real(*arguments, **keywords)

    monkeypatch.setattr(saving, "save", watched)
    checkpoints = train(source, tmp_path / "run", async_mode=mode)
    assert tensor_hashes(checkpoints) == tensor_hashes(whole / "checkpoints")
    assert threads == {False, True}  # the last one is waited for, in the training thread


def test_training_goes_on_while_a_thread_writes(source, tmp_path, monkeypatch):
    """The save of step 2 only finishes after step 3 has been logged."""
    run = RunDirectory(tmp_path / "run")
    real, seen = saving.save, []

    def slow(*arguments: Any, **keywords: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            pause = threading.Event()
            while not seen and len(run.read_metrics()) < 3:
                pause.wait(0.01)
            seen.append(len(run.read_metrics()))
        return real(*arguments, **keywords)

    monkeypatch.setattr(saving, "save", slow)
    checkpoints = train(source, run.path, async_mode="async")
    assert seen[0] >= 3
    assert committed_steps(checkpoints) == [2, 4, 6]


def fail_at(monkeypatch: pytest.MonkeyPatch, steps: set[str]) -> None:
    real = saving.save

    def broken(*arguments: Any, checkpoint_id: str, **keywords: Any) -> Any:
        if Path(checkpoint_id).name in steps:
            raise OSError(28, "No space left on device")
        return real(*arguments, checkpoint_id=checkpoint_id, **keywords)

    monkeypatch.setattr(saving, "save", broken)


def test_a_failed_save_is_loud_and_training_goes_on(source, tmp_path, monkeypatch, capfd):
    fail_at(monkeypatch, {"step-4"})
    checkpoints = train(source, tmp_path / "run", async_mode="async", retry_seconds=0.01)
    assert committed_steps(checkpoints) == [2, 6]
    assert len(RunDirectory(tmp_path / "run").read_metrics()) == STEPS
    errors = [line for line in capfd.readouterr().out.splitlines() if " - ERROR - " in line]
    assert len(errors) == 4
    assert errors[2].endswith(
        "(attempt 3 of 3): OSError: [Errno 28] No space left on device (rank 0)"
    )
    assert errors[3].endswith("Training goes on; older checkpoints are untouched")


def test_a_run_whose_last_save_fails_does_not_end_well(source, tmp_path, monkeypatch):
    fail_at(monkeypatch, {"step-6"})
    with pytest.raises(OSError, match=r"step-6 was not saved: OSError: \[Errno 28\]"):
        train(source, tmp_path / "run", retry_seconds=0.01)
    assert committed_steps(tmp_path / "run" / "checkpoints") == [2, 4]


def test_a_damaged_checkpoint_is_left_aside_and_the_run_repeats_its_steps(
    source, whole, tmp_path, capfd
):
    checkpoints = train(source, tmp_path / "run", steps=4)
    flip_a_bit(checkpoints / "step-4" / "__0_0.distcp")
    train(source, tmp_path / "run")
    log = capfd.readouterr().out
    assert "Skipping checkpoint step-4: __0_0.distcp has a different SHA-256" in log
    assert "Renamed" in log
    assert (checkpoints / "damaged-step-4" / MANIFEST).is_file()
    assert tensor_hashes(checkpoints) == tensor_hashes(whole / "checkpoints")


def test_ends_of_stages_multiples_and_tags_outlive_the_keep_policy(source, tmp_path):
    settings = {"interval": 1, "keep_latest_k": 2, "keep_every": 4}
    checkpoints = train(source, tmp_path / "run", steps=3, **settings)
    assert not read_manifest(checkpoints / "step-3")["stage_end"]  # it was only cut short
    add_tag(checkpoints / "step-3", "paper")
    train(source, tmp_path / "run", **settings)
    assert read_manifest(checkpoints / "step-6")["stage_end"]
    # 3 has a tag, 4 is a multiple, 5 and 6 are the newest.
    assert committed_steps(checkpoints) == [3, 4, 5, 6]
    longer = small_config(source, tmp_path / "run", steps=9)
    for name, value in settings.items():
        setattr(longer.checkpoint, name, value)
    train_run(longer)
    assert committed_steps(checkpoints) == [3, 4, 6, 8, 9]  # a stage ended with 6


def test_the_manifest_carries_lineage(source, tmp_path):
    checkpoints = train(source, tmp_path / "run", steps=4)
    train(source, tmp_path / "run")
    first, second, third = (read_manifest(checkpoints / f"step-{step}") for step in (2, 4, 6))
    assert first["lineage"]["parent"] is None
    for child, parent in ((second, 2), (third, 4)):
        reference = child["lineage"]["parent"]
        assert reference["path"] == str(checkpoints / f"step-{parent}")
        record = json.loads((checkpoints / f"step-{parent}" / MANIFEST).read_text())
        digest = record.pop("sha256")
        text = json.dumps(record, sort_keys=True, ensure_ascii=False)
        assert reference["manifest_sha256"] == digest == hashlib.sha256(text.encode()).hexdigest()
    assert len(first["lineage"]["recipe_sha256"]) == 64
    # The first start had a step limit, the second had none: both train one recipe.
    assert len({part["lineage"]["recipe_sha256"] for part in (first, second, third)}) == 1
    assert first["lineage"]["versions"]["torch"] == str(torch.__version__)
    assert third["trainer"]["tokens"] == STEPS * BATCH_TOKENS
    assert third["trainer"]["recurrent_steps"] == 2
    assert third["data"]["windows_consumed"] == STEPS * BATCH_WINDOWS


def test_a_second_run_in_one_directory_is_refused(source, tmp_path):
    run = tmp_path / "run"
    with held(run) as holder:
        with pytest.raises(UserError, match=rf"is in use by another run \(process {holder.pid} "):
            train(source, run)
        assert (run / LOCK).exists()
        assert not RunDirectory(run).run_json.exists()
        holder.kill()
        holder.wait(60)
        # Its file is still there, and means nothing.
        assert committed_steps(train(source, run)) == [2, 4, 6]
