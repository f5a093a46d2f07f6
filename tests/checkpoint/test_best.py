"""`--best`: the checkpoint with the lowest held-out loss stays, and has a name."""

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoint.test_choosing import committed
from tests.checkpoint.test_remote import remote
from tests.support.tiny import tiny_config, train_run
from titan_loop.checkpoint import saving
from titan_loop.checkpoint.folders import committed_steps
from titan_loop.checkpoint.keep_policy import (
    Best,
    KeepPolicy,
    best_with,
    delete_stale,
    named_checkpoint,
)
from titan_loop.checkpoint.listing import list_checkpoints
from titan_loop.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from titan_loop.checkpoint.start_from import StartFrom
from titan_loop.errors import UserError
from titan_loop.evaluation.evaluate_tasks import evaluate_tasks
from titan_loop.evaluation.task_options import TaskOptions
from titan_loop.evaluation.task_report import ReadingResult, TaskReport
from titan_loop.evaluation.while_training import HeldOutLoss
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer


def with_best(checkpoint: Path, step: int, loss: float = 1.0) -> Path:
    content = read_manifest(checkpoint)
    best = {"step": step, "held_out_loss": loss, "measured_on": "text"}
    del content["sha256"]
    write_manifest(checkpoint, {**content, "best": best})
    return checkpoint


@pytest.mark.parametrize(
    ("loss", "text", "step", "wins"),
    [(2.9, "a", 4, True), (3.0, "a", 4, False), (9.0, "b", 4, True), (2.9, "a", 6, False)],
)
def test_a_lower_loss_of_this_step_is_better_and_other_text_counts_no_more(loss, text, step, wins):
    first = Best(step=2, held_out_loss=3.0, measured_on="a")
    later = Best(step=4, held_out_loss=loss, measured_on=text)
    assert best_with(first, later, step) is (later if wins else first)
    assert best_with(first, None, 4) is first


def test_the_best_one_stays_here_and_in_the_object_store(tmp_path: Path):
    folder = tmp_path / "run" / "checkpoints"
    for step in (2, 4, 6, 8):
        with_best(committed(folder, step), min(step, 4))
    delete_stale(folder, KeepPolicy(keep_latest_k=1), newest=8, in_use=lambda path: False)
    assert committed_steps(folder) == [4, 8]
    assert [listed.kept for listed in list_checkpoints(folder)] == [["best"], []]
    copies = remote(tmp_path / "run", f"file://{tmp_path}/remote")
    for step in (4, 8):
        copies.upload(folder / f"step-{step}")
    with_best(committed(folder, 10), 4)
    copies.upload(folder / "step-10")
    copies.delete_stale(KeepPolicy(keep_latest_k=1))
    assert copies.steps() == [4, 10]


def test_the_name_stands_for_what_the_newest_manifest_says(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    with pytest.raises(UserError, match="no checkpoint there names the best one"):
        named_checkpoint(folder / "best")
    with_best(committed(folder, 2), 2)
    with_best(committed(folder, 4), 2)
    (with_best(committed(folder, 6), 6) / MANIFEST).write_text("{}")  # damaged
    assert named_checkpoint(folder / "best") == folder / "step-2"
    assert named_checkpoint(folder / "step-9") == folder / "step-9"
    assert StartFrom(parent=str(folder / "best")).find_parent() == folder / "step-2"
    (folder / "step-2" / MANIFEST).unlink()
    with pytest.raises(UserError, match="best is step-2, which is gone"):
        named_checkpoint(folder / "best")


def test_the_loss_weighs_sources_as_the_mixture_does(source: Path, tmp_path: Path):
    config = tiny_config(source, tmp_path / "run")
    other = str(tmp_path / "other")
    config.dataloader.mixture = [f"{source}=3", f"{other}=1"]
    config.held_out.windows = 5

    def result(nats: float) -> dict[str, ReadingResult]:
        return {"static:2": ReadingResult(metrics={"nats_per_token": nats})}

    tasks = {"held_out/source": result(4.0), "held_out/other": result(8.0)}
    report = TaskReport(
        step=1, tokens=1, trained_recurrent_steps=2, manifest_sha256="", tasks=tasks
    )
    loss = HeldOutLoss.of(config, [str(source), other])
    assert loss.value(report, 2) == pytest.approx(5.0)
    assert loss.measured_on == "5 windows of source 3, other 1"
    assert HeldOutLoss.of(config, [other]).value(report, 2) == pytest.approx(8.0)
    report.tasks["held_out/third"] = result(12.0)
    loss = HeldOutLoss.of(config, [str(source), str(tmp_path / "third")])
    assert loss.value(report, 2) == pytest.approx(8.0)  # not of the mixture: equal shares


def test_the_depth_is_that_of_a_step_in_which_the_schedule_jumps(source: Path, tmp_path: Path):
    config = tiny_config(source, tmp_path / "run")
    config.recurrence.steps = Schedule.steps([(0, 2), (1400, 3)])
    plan = config.plan_step(step=6, tokens=1280, seed=0)
    trainer: Any = SimpleNamespace(plan=plan, tokens=1536)
    assert HeldOutLoss.of(config, [str(source)]).depth(trainer) == plan.recurrent_steps == 2


def config_of(source: Path, folder: Path, *, limit: int = 0) -> LoopTrainer.Config:
    config = tiny_config(source, folder, steps=6)
    config.best = True
    config.held_out.interval, config.held_out.depths, config.held_out.windows = 1, [1], 4
    config.checkpoint.interval, config.checkpoint.keep_latest_k = 3, 2
    config.training.steps = limit
    return config


@pytest.mark.usefixtures("alone")
def test_a_run_keeps_its_best_checkpoint_through_a_restart(source, tmp_path, monkeypatch):
    script = {1: 5.0, 2: 3.0, 3: 4.5, 4: 3.5, 5: 3.0, 6: 7.0}
    run = RunDirectory(tmp_path / "run")
    with monkeypatch.context() as scripted:
        scripted.setattr(HeldOutLoss, "value", lambda self, report, depth: script[report.step])
        for limit, steps in ((1, [1]), (4, [2, 3, 4]), (0, [2, 4, 6])):
            train_run(config_of(source, run.path, limit=limit))
            assert committed_steps(run.checkpoints) == steps
    best = {"step": 2, "held_out_loss": 3.0, "measured_on": "4 windows of source 1"}
    assert read_manifest(run.checkpoint(6))["best"] == best
    train_run(tiny_config(source, tmp_path / "plain"))
    plain = RunDirectory(tmp_path / "plain").read_metrics()
    assert [r["loss"] for r in run.read_metrics()] == [r["loss"] for r in plain]

    named = run.checkpoints / "best"
    assert SavedRun.open(named).checkpoint().step == 2
    assert evaluate_tasks(named, TaskOptions(depths=(1,), windows=2)).step == 2


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("fails", [False, True])
def test_an_evaluation_does_not_wait_for_the_save_of_the_best_checkpoint(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
):
    """The save of step 2 ends after the evaluation of step 3, which is worse than that of 2."""
    script = {1: 5.0, 2: 3.0, 3: 4.0, 4: 4.5, 5: 4.5, 6: 7.0}
    run, real, released = RunDirectory(tmp_path / "run"), saving.save, threading.Event()

    def slow(*arguments: Any, checkpoint_id: str, **keywords: Any) -> Any:
        if Path(checkpoint_id).name == "step-2":
            assert released.wait(60)
            if fails:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments, checkpoint_id=checkpoint_id, **keywords)

    def value(self: HeldOutLoss, report: TaskReport, depth: int) -> float:
        if report.step == 4:  # step 3, which is better than step 1, is over
            released.set()
        return script[report.step]

    monkeypatch.setattr(saving, "save", slow)
    monkeypatch.setattr(HeldOutLoss, "value", value)
    config = config_of(source, run.path)
    config.checkpoint.interval, config.checkpoint.async_mode = 100, "async"
    config.checkpoint.keep_latest_k, config.checkpoint.save_attempts = 0, 1
    train_run(config)
    assert committed_steps(run.checkpoints) == ([1, 6] if fails else [1, 2, 6])
    assert read_manifest(run.checkpoint(6))["best"]["step"] == (1 if fails else 2)
