"""A signal ends a run at a step boundary with everything saved; what is stuck ends all the same."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.multiprocess import preloaded_context
from tests.support.tiny import tiny_config, train_run
from titan_loop.checkpoint.folders import committed_steps
from titan_loop.cli.main import main
from titan_loop.errors import EXIT_INTERRUPTED, EXIT_STOPPED, StoppedError, UserError
from titan_loop.recipes.recipe import Recipe
from titan_loop.recipes.start import run_recipe
from titan_loop.runs.exit_reports import REPORTS_VARIABLE, read_exits
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.callback import Callback
from titan_loop.training.stop_request import GRACE_VARIABLE, StopListener, grace_seconds
from titan_loop.training.trainer import LoopTrainer

STEPS = 6


class SignalAt(Callback):
    """A callback that sends this process a signal at one step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: LoopTrainer, metrics: Mapping[str, Any]) -> None:
        if trainer.step == self.step:
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until_heard(trainer.stop_listener)


def wait_until_heard(listener: StopListener) -> None:
    """The listening thread needs a moment; a test must not depend on which."""
    waiting = threading.Event()
    for _ in range(6000):
        if listener.requested_by is not None:
            return
        waiting.wait(0.01)
    raise AssertionError(f"not heard within a minute by {threading.enumerate()}")


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in RunDirectory(run).read_metrics()]


@pytest.mark.usefixtures("alone")
def test_a_run_saves_at_the_next_boundary_and_goes_on(source, tmp_path):
    train_run(tiny_config(source, tmp_path / "whole", steps=STEPS))
    config = tiny_config(source, tmp_path / "stopped", steps=STEPS)
    config.checkpoint.interval = 100
    config.held_out.interval = 1  # a signal may come in the middle of it
    config.held_out.windows = 1
    config.callbacks = (SignalAt(2),)
    with StopListener() as listener, pytest.raises(StoppedError, match="after step 3 of 6"):
        train_run(config, stop_listener=listener)
    assert listener.requested_by == "SIGUSR1"
    assert committed_steps(tmp_path / "stopped" / "checkpoints") == [3]
    train_run(tiny_config(source, tmp_path / "stopped", steps=STEPS))
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


@pytest.mark.usefixtures("alone")
def test_a_signal_before_the_first_step_ends_the_recipe(source, tmp_path):
    config = tiny_config(source, tmp_path / "run", steps=STEPS)
    with StopListener() as listener:
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until_heard(listener)
        with pytest.raises(StoppedError, match="before its first step"):
            run_recipe(Recipe.of_one_run("run", config), stop_listener=listener)
    assert committed_steps(tmp_path / "run" / "checkpoints") == []


def stuck_here(signals: int) -> None:
    for _ in range(signals):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
    time.sleep(300)


def get_stuck(folder: Path, hang: float, signals: int, limits: dict[str, float]) -> None:
    """Be rank 0 of a job that keeps reports of how its ranks ended."""
    os.environ |= {REPORTS_VARIABLE: str(folder), "SLURM_PROCID": "0"}
    log = (folder / "log").open("w")
    os.dup2(log.fileno(), 2)
    sys.stderr = sys.__stderr__ = log
    with StopListener(**{"grace": 300, **limits}) as listener:
        listener.watch(hang, (folder / "dumped").touch)
        stuck_here(signals)


@pytest.mark.parametrize(
    ("hang", "signals", "limits", "reason"),
    [
        (0, 1, {"grace": 0.2}, "0.2 s after SIGUSR1 it has not stopped"),
        (0.2, 0, {}, "no progress for 0.2 s (hang_seconds)"),
        (0, 100, {"echo": 0.01}, "a second signal, SIGUSR1"),
    ],
)
def test_a_stuck_process_ends_with_stacks_and_traces(hang, signals, limits, reason, tmp_path):
    child = preloaded_context().Process(target=get_stuck, args=(tmp_path, hang, signals, limits))
    child.start()
    child.join()
    said = (tmp_path / "log").read_text()
    assert child.exitcode == EXIT_STOPPED, said
    assert [each.code for each in read_exits(tmp_path)] == [EXIT_STOPPED]
    assert f"rank 0: {reason}; ended without a new checkpoint" in said
    assert "in stuck_here" in said
    assert (tmp_path / "dumped").exists()


ORPHAN = """
import os, threading
from titan_loop.training.stop_request import GRACE_VARIABLE, StopListener, grace_seconds

with StopListener() as listener:
    print("listening", flush=True)
    while listener.requested_by is None:
        threading.Event().wait(0.01)
print(listener.requested_by, flush=True)
"""


def test_a_rank_hears_that_torchrun_was_killed():
    """The agent here is a shell; without its word the rank would wait for ever."""
    agent = subprocess.Popen(
        ["/bin/sh", "-c", '"$0" -c "$1"; :', sys.executable, ORPHAN],
        env={**os.environ, "TORCHELASTIC_RUN_ID": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    assert agent.stdout.readline() == "listening\n"
    agent.kill()
    assert agent.communicate()[0] == "SIGTERM\n"


class InterruptAt(Callback):
    """Sends this process Ctrl-C after the second step."""

    def __init__(self, times: int) -> None:
        self.times = times

    def on_step_end(self, trainer: LoopTrainer, metrics: Mapping[str, Any]) -> None:
        if trainer.step == 2:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)
                wait_until_heard(trainer.stop_listener)


def interrupted_recipe() -> LoopTrainer.Config:
    source, folder, times = sys.argv[1:4]
    config = tiny_config(Path(source), Path(folder), steps=STEPS)
    config.checkpoint.interval = 100
    config.callbacks = (InterruptAt(int(times)),)
    return config


def train_interrupted(source: Path, folder: Path, times: int, log: Path) -> None:
    """Train in a process of its own, which ends with the command's code."""
    file = log.open("w")
    os.dup2(file.fileno(), 2)
    sys.stderr = sys.__stderr__ = file
    sys.argv = ["train", str(source), str(folder), str(times)]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal
    sys.exit(main(["train", f"{__name__}:interrupted_recipe"]))


@pytest.mark.parametrize(("times", "saved"), [(1, [3]), (2, [])])
def test_ctrl_c_saves_at_the_boundary_and_a_second_one_leaves_at_once(
    source: Path, tmp_path: Path, times: int, saved: list[int]
):
    run, log = tmp_path / "run", tmp_path / "log"
    child = preloaded_context().Process(target=train_interrupted, args=(source, run, times, log))
    child.start()
    child.join()
    printed = log.read_text()
    assert child.exitcode == EXIT_INTERRUPTED, printed
    assert "saving after this step; a second Ctrl-C leaves at once" in printed
    if times == 1:
        assert "stopped after step 3 of 6; the same command goes on from there" in printed
        assert "Traceback" not in printed
    assert committed_steps(run / "checkpoints") == saved


@pytest.mark.parametrize("text", ["soon", "0", "inf"])
def test_a_grace_time_that_is_none_is_refused(text):
    with pytest.raises(UserError, match=f"{GRACE_VARIABLE}={text}"):
        grace_seconds({GRACE_VARIABLE: text})
    assert grace_seconds({GRACE_VARIABLE: "0.5"}) == 0.5
