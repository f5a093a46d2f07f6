"""A run whose disk fails at any moment: never a user's mistake, never a lost token."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.support.failing_disk import FailingDisk
from tests.support.multiprocess import preloaded_context
from tests.support.tiny import tiny_config, train_run
from titan_loop.checkpoint.folders import committed_steps
from titan_loop.checkpoint.manager import LoopCheckpointManager
from titan_loop.errors import EXIT_CRASH, EXIT_OK, exit_code
from titan_loop.evaluation.while_training import WhileTraining
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage import transient
from titan_loop.storage.json_files import read_jsonl
from titan_loop.training.callback import Callback
from titan_loop.training.metrics_processor import LoopMetricsProcessor
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

STEPS = 4
FULL = ("ENOSPC", "EDQUOT")

Moment = tuple[Any, str, int]
"""What runs then, and of all its calls the one with this number."""

WHILE_TRAINING: list[Moment] = [
    (LoopTrainer, "train_step", 1),
    (LoopMetricsProcessor, "log_step", 3),
    (LoopCheckpointManager, "_write", 1),
    (WhileTraining, "on_step_end", 2),
]
LAST_SAVE: list[Moment] = [(LoopCheckpointManager, "_write", 2)]

# When → the moments of the first start, and the exit code that follows.
TIMES: dict[str, tuple[list[Moment], int]] = {
    "while training": (WHILE_TRAINING, EXIT_OK),
    "end": (LAST_SAVE, EXIT_CRASH),  # the last save must succeed
    "start": ([], EXIT_CRASH),
}
# Reads and writes that fail, writes alone, and a full disk differ at every moment. Further errors
# of a kind are told from a user's mistake at the start; a run that has started survives them all.
CASES = [
    *((fault, when) for fault in ("EIO", "ENOSPC") for when in TIMES),
    ("EROFS", "while training"),
    ("ESTALE", "start"),
]


def config_of(source: Path, run: Path) -> LoopTrainer.Config:
    config = tiny_config(source, run, steps=STEPS)
    config.model.n_layers, config.recurrence.steps = 1, Schedule.constant(1)
    config.held_out.interval = 2
    config.held_out.windows = 2
    config.checkpoint.retry_seconds = 0.0
    return config


def train(config: LoopTrainer.Config) -> tuple[int, str]:
    """Return the exit code of a start, and how it ended."""
    transient.WAIT_SECONDS = 0.0
    try:
        train_run(config)
        return EXIT_OK, ""
    except Exception as error:
        return exit_code(error), str(error)


def fail_during(disk: FailingDisk, fault: int, met: set[str], moment: Moment) -> None:
    """Let the disk fail during a call, and add its name to `met` if the call noticed."""
    owner, name, number = moment
    real, calls = getattr(owner, name), 0

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != number:
            return real(*arguments, **keywords)
        disk.fault, before = fault, disk.count
        try:
            return real(*arguments, **keywords)
        finally:
            disk.fault = 0
            if disk.count > before:
                met.add(name)

    setattr(owner, name, wrapped)


def two_starts(source: Path, run: Path, when: str, fault: int, answer: Connection) -> None:
    """Train on a disk that fails at some moments, then start again on one that works."""
    run.mkdir()
    disk, met = FailingDisk(run), set[str]()
    moments, _ = TIMES[when]
    for moment in moments:
        fail_during(disk, fault, met, moment)
    if not moments:
        disk.fault = fault
    first = train(config_of(source, run))
    disk.fault = 0
    answer.send((disk.count, met, first, train(config_of(source, run))))


def in_a_process(target: Callable[..., None], *arguments: Any) -> Any:
    context = preloaded_context()
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=target, args=(*arguments, sender))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        child.join()


def whole_run(source: Path, run: Path, answer: Connection) -> None:
    answer.send(train(config_of(source, run)))


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The records of a run on a disk that works."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert in_a_process(whole_run, source, run) == (EXIT_OK, "")
    return records_of(run)


def records_of(run: Path) -> list[dict[str, Any]]:
    """Return what does not depend on time; on any disk all logs have all steps."""
    directory = RunDirectory(run)
    assert {record["step"] for record in read_jsonl(directory.evals_jsonl)} == {2, 4}
    names = ("step", "tokens", "loss", "lr", "data_hash")
    return [{name: record[name] for name in names} for record in directory.read_metrics()]


@pytest.mark.parametrize(("fault", "when"), CASES)
def test_a_disk_that_fails_at_any_moment_costs_no_token(source, whole, tmp_path, fault, when):
    run = tmp_path / "run"
    number = getattr(errno, fault)
    moments, code = TIMES[when]
    count, met, first, second = in_a_process(two_starts, source, run, when, number)
    assert count > 0
    assert met == {name for _, name, _ in moments}
    assert first[0] == code, first
    if when == "start":
        words = "bytes more are needed" if fault in FULL else os.strerror(number)
        assert words in first[1]
    assert second == (EXIT_OK, "")
    assert records_of(run) == whole
    assert committed_steps(run / "checkpoints")[-1] == STEPS


class Fill(Callback):
    """Takes all the room there is after a step, with a file that is called ballast."""

    def __init__(self, disk: Path, step: int) -> None:
        self.ballast, self._step = disk / "ballast", step

    def on_step_end(self, trainer: Any, metrics: Any) -> None:
        """Write until nothing fits any more."""
        if trainer.step != self._step:
            return
        with self.ballast.open("wb", buffering=0) as file:
            for size in (2**16, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue


def fill_then_free(source: Path, disk: Path, answer: Connection) -> None:
    """Train on a disk that fills after step 2, start again while it is full, then with room."""
    config = config_of(source, disk / "run")
    fill = Fill(disk, 2)
    first = train(replace(config, callbacks=(fill,)))
    second = train(config)
    fill.ballast.unlink()
    answer.send((first, second, train(config)))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "small"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs root and a mountable tmpfs")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_while_training_ends_no_run_before_its_last_save(
    source, whole, small_disk
):
    first, second, third = in_a_process(fill_then_free, source, small_disk)
    assert first[0] == EXIT_CRASH
    assert "step-4 was not saved" in first[1]
    assert second[0] == EXIT_CRASH
    assert "bytes more are needed; make room, then start again" in second[1]
    assert third == (EXIT_OK, "")
    assert records_of(small_disk / "run") == whole
