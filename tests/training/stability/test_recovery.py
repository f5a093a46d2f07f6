"""A tiny run through bad windows and a layer that goes bad: skipped, gone back, passed."""

import itertools
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import titan_loop.compat as compat  # before any torchtitan module
import torch

import titan_loop.recipes.on_disk
from tests.support.multiprocess import preloaded_context
from tests.support.spikes import Spikes
from tests.support.tiny import BATCH_WINDOWS, act_as_launched, train_run
from titan_loop.analysis.report import write_report
from titan_loop.checkpoint.folders import committed_steps
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.checkpoint.rewinds import read_rewinds
from titan_loop.cli.main import main
from titan_loop.errors import EXIT_UNSTABLE, StoppedError, UnstableError, exit_code
from titan_loop.launch.job import final_code
from titan_loop.models.initialisation import local_part
from titan_loop.runs.decisions import count_decisions
from titan_loop.runs.exit_reports import RankExit
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.callback import Callback, TrainingState
from titan_loop.training.schedule import Schedule
from titan_loop.training.stability import recovery
from titan_loop.training.stop_request import StopListener
from titan_loop.training.trainer import LoopTrainer
from tools.spikes import STEPS
from tools.spikes import demonstration as shown

DECISIONS = [
    ("skip", 14),
    ("skip", 15),
    ("rewind", 15),
    ("skip", 23),
    ("skip", 31),
    ("skip", 32),
    ("rewind", 32),
]
"""What `tools/spikes.py` shows."""


class Snapshots(Callback):
    """Keeps weights and optimiser state after each step."""

    def __init__(self) -> None:
        self.after: dict[int, list[torch.Tensor]] = {}

    def on_step_end(self, trainer: TrainingState, metrics: Mapping[str, Any]) -> None:
        state = [v for o in trainer.optimizers for s in o.state.values() for v in s.values()]
        tensors = [*trainer.model.parameters(), *(v for v in state if torch.is_tensor(v))]
        if trainer.step not in self.after:
            self.after[trainer.step] = [local_part(t.detach()).clone() for t in tensors]

    def equal(self, one: int, other: int) -> bool:
        pairs = zip(self.after[one], self.after[other], strict=True)
        return all(torch.equal(a, b) for a, b in pairs)


def demonstration(source: Path, folder: Path) -> LoopTrainer.Config:
    """Return what `tools/spikes.py` trains, with smaller steps."""
    config = shown(source, folder)
    config.recurrence.steps = Schedule.constant(1)
    return config


def start_alone() -> None:
    compat.skip_final_pause()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        os.environ.pop(name, None)


def decisions(run: Path) -> list[tuple[str, int]]:
    return [(r["decision"], r["step"]) for r in RunDirectory(run).read_decisions()]


@pytest.fixture(scope="module")
def passed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Snapshots]:
    """The demonstration, uninterrupted, in a process of one rank."""
    folder, kept = tmp_path_factory.mktemp("passed") / "run", Snapshots()
    environment = dict(os.environ)
    start_alone()
    config = demonstration(source, folder)
    config.callbacks = (*config.callbacks, kept)
    try:
        train_run(config)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
    return folder, kept


def test_spikes_are_skipped_gone_back_for_and_passed(passed: tuple[Path, Snapshots]):
    run = RunDirectory(passed[0])
    records = run.read_decisions()
    assert decisions(run.path) == DECISIONS
    assert records[2]["windows"] == [[104, 120]]
    assert records[2]["to_step"] == 12
    assert records[-1]["to_step"] == 28  # 32 was skipped, so it was not saved
    for record in records:
        if record["decision"] == "skip":
            over = record["loss"] > record["loss_bound"]
            assert over or record["grad_norm"] > record["grad_norm_bound"]
    metrics = run.read_metrics()
    assert [record["step"] for record in metrics] == list(range(1, STEPS + 1))
    assert metrics[-1]["loss"] < metrics[10]["loss"]
    page = write_report(run).read_text()
    assert "<h2>Spikes</h2>" in page
    assert "back to step 12, over these windows" in page
    assert count_decisions(records) == "5 spikes skipped, 2 rewinds"
    manifest = read_manifest(run.checkpoint(STEPS))
    jumps = manifest["lineage"]["jumps"]
    assert [jump["to_step"] for jump in jumps] == [12, 28]
    jumped = [tuple(pair) for jump in jumps for pair in jump["windows"]]
    assert manifest["data"]["jumped"] == [list(pair) for pair in jumped]
    left_out = sum(stop - first for first, stop in jumped)
    assert left_out == 4 * BATCH_WINDOWS
    assert manifest["data"]["windows_consumed"] == STEPS * BATCH_WINDOWS + left_out
    assert manifest["trainer"]["tokens"] == STEPS * BATCH_WINDOWS * 32


def test_a_skipped_step_leaves_weights_and_optimiser_alone(passed: tuple[Path, Snapshots]):
    kept = passed[1]
    for one, other in itertools.pairwise(range(10, 30)):  # 15 as it was after the rewind
        assert kept.equal(one, other) == (other in (14, 23)), other


@pytest.mark.usefixtures("alone")
def test_a_skipped_step_leaves_muon_alone(source: Path, tmp_path: Path):
    config, kept = demonstration(source, tmp_path), Snapshots()
    config.optimizer.name, config.training.steps = "muon", 14
    config.training.local_batch_size = 4  # two micro-batches
    config.callbacks = (*config.callbacks, kept)
    train_run(config)
    assert decisions(tmp_path) == [("skip", 14)]
    assert kept.equal(13, 14)
    assert not kept.equal(12, 13)
    assert read_manifest(RunDirectory(tmp_path).checkpoint(14))["step"] == 14  # the planned end


def always_bad(source: Path, folder: Path) -> LoopTrainer.Config:
    config = demonstration(source, folder)
    config.callbacks = (Spikes(range(13 * BATCH_WINDOWS, STEPS * 2 * BATCH_WINDOWS)),)
    config.stability.rewinds = 1
    return config


@pytest.mark.usefixtures("alone")
def test_spikes_that_go_on_end_the_run_with_a_code_of_its_own(source: Path, tmp_path: Path, capfd):
    config = always_bad(source, tmp_path)
    config.metrics.log_freq = 50  # verdicts are read a step later
    with pytest.raises(
        UnstableError, match=r"no rewind is left \(stability.rewinds=1\)"
    ) as failure:
        train_run(config)
    unstable = RankExit(0, "", EXIT_UNSTABLE)
    assert exit_code(failure.value) == EXIT_UNSTABLE == final_code(143, [unstable])
    taken = " ".join(name for name, _ in decisions(tmp_path))
    assert taken == "skip skip rewind skip skip stop"
    assert committed_steps(tmp_path / "checkpoints")[-1] == 12
    assert main(["status", str(tmp_path)]) == 0
    assert "4 spikes skipped, 1 rewinds" in capfd.readouterr().out


@pytest.mark.usefixtures("alone")
def test_a_run_that_is_asked_to_stop_at_a_skipped_step_saves_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config, kept = demonstration(source, tmp_path), Snapshots()
    asked = property(lambda self: "SIGTERM" if 13 in kept.after else None)
    monkeypatch.setattr(StopListener, "requested_by", asked)
    config.callbacks = (*config.callbacks, kept)
    with pytest.raises(StoppedError, match="stopped after step 14"):
        train_run(config)
    assert decisions(tmp_path) == [("skip", 14)]
    assert committed_steps(tmp_path / "checkpoints")[-1] == 14


@pytest.mark.usefixtures("alone")
def test_a_rewind_survives_the_loss_of_the_disk(
    passed: tuple[Path, Snapshots], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Killed once the first rewind is recorded; the store alone is left then."""
    config = demonstration(source, tmp_path / "run")
    config.checkpoint.remote = f"file://{tmp_path}/remote"
    real = titan_loop.recipes.on_disk.take_up_rewinds

    def killed(run: Path, *arguments: Any) -> None:
        if read_rewinds(run):
            raise KeyboardInterrupt
        real(run, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(titan_loop.recipes.on_disk, "take_up_rewinds", killed)
        with pytest.raises(KeyboardInterrupt):
            train_run(config)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    shutil.copy(tmp_path / "remote" / "owner.json", tmp_path / "run" / "remote.json")
    train_run(config)
    whole, run = RunDirectory(passed[0]), RunDirectory(tmp_path / "run")
    found, expected = run.read_metrics(), whole.read_metrics()
    assert [record["data_hash"] for record in found] == [r["data_hash"] for r in expected[12:]]
    manifests = [read_manifest(each.checkpoint(STEPS)) for each in (run, whole)]
    for name in ("windows", "to_step"):
        jumps = [[jump[name] for jump in m["lineage"]["jumps"]] for m in manifests]
        assert jumps[0] == jumps[1]
    hashes = [manifest["files"]["__0_0.distcp"]["sha256"] for manifest in manifests]
    assert hashes[0] == hashes[1]  # the tensors, to the last bit
    steps = [int(path.name[5:]) for path in (tmp_path / "remote").glob("step-*")]
    assert sorted(steps) == [4, 8, *committed_steps(run.checkpoints)]


class KillAfterRewind(Callback):
    """Kills this process after a step, once the run has gone back."""

    def __init__(self, run: Path, step: int) -> None:
        self._run, self._step = run, step

    def on_step_end(self, trainer: TrainingState, metrics: Mapping[str, Any]) -> None:
        went_back = any(name == "rewind" for name, _ in decisions(self._run))
        if trainer.step == self._step and went_back:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until(source: Path, run: Path, reached: tuple[str, int]) -> None:
    """Train, and die once a decision was recorded, or after a step that follows the rewind."""
    os.setsid()
    start_alone()
    torch.set_num_threads(1)
    record = recovery.append_or_keep

    def recorded(path: Path, decision: dict[str, Any]) -> None:
        record(path, decision)
        if (decision["decision"], decision["step"]) == reached:
            os.kill(os.getpid(), signal.SIGKILL)

    recovery.append_or_keep = recorded
    config = demonstration(source, run)
    if reached[0] == "step":
        config.callbacks = (*config.callbacks, KillAfterRewind(run, reached[1]))
    train_run(config)


def train_on_two(source: Path, run: Path) -> None:
    act_as_launched(2)
    train_run(demonstration(source, run))


@pytest.mark.multiprocess
def test_a_run_that_is_killed_takes_the_same_decisions_also_on_two_ranks(
    gloo_pool, passed: tuple[Path, Snapshots], source: Path, tmp_path: Path
):
    """Killed after a skip, right after a rewind and a step later, and in the second episode."""
    run = tmp_path / "run"
    for reached in (("skip", 14), ("rewind", 15), ("step", 13), ("skip", 31)):
        process = preloaded_context().Process(target=train_until, args=(source, run, reached))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL, reached
    gloo_pool(2).run(train_on_two, source, run)
    assert decisions(run) == DECISIONS
    whole = RunDirectory(passed[0])
    found, expected = RunDirectory(run).read_metrics(), whole.read_metrics()
    for name in ("data_hash", "windows_consumed", "tokens", "lr", "recurrent_steps"):
        assert [record[name] for record in found] == [record[name] for record in expected]
    for mine, other in zip(RunDirectory(run).read_decisions(), whole.read_decisions(), strict=True):
        assert (mine["windows"], mine["rewound"]) == (other["windows"], other["rewound"])
    manifests = [read_manifest(r.checkpoint(STEPS)) for r in (RunDirectory(run), whole)]
    jumps = [[j["windows"] for j in m["lineage"]["jumps"]] for m in manifests]
    assert jumps[0] == jumps[1]
