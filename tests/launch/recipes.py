"""Recipes that SLURM jobs of the tests train, on generated data.

What a job shall do besides training is in its environment, so that one recipe, hence one series of
losses, serves all tests.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.mano import Mano
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.callback import Callback
from titan_loop.training.optimizers.adamw import AdamWConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

STEPS = 12
BATCH_WINDOWS = 4
HELD_SECONDS = 900
WINDOW_TOKENS = 32


class Held(Callback):
    """Waits where TEST_HELD_STARTS of a job's starts end: at step 3, then 6, then 9.

    A rank that is asked to stop goes on at once; one that nobody asks fails after a while.
    """

    def on_step_end(self, trainer: LoopTrainer, metrics: Mapping[str, Any]) -> None:
        """Wait to be asked to stop, if this is where."""
        start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        held = start < int(os.environ.get("TEST_HELD_STARTS", "0"))
        if not held or trainer.step != 3 * (start + 1):
            return
        deadline = time.monotonic() + HELD_SECONDS
        while trainer.stop_listener.requested_by is None:
            if time.monotonic() > deadline:
                raise TimeoutError("nobody asked this rank to stop")
            time.sleep(0.05)


class Hung(Callback):
    """Never returns from a step of rank 1 in a job's first start, if TEST_HANG is set."""

    def on_step_end(self, trainer: LoopTrainer, metrics: Mapping[str, Any]) -> None:
        """Hang after step 3, if this is where."""
        first = "SLURM_RESTART_COUNT" not in os.environ
        if first and "TEST_HANG" in os.environ and trainer.step == 3 and os.environ["RANK"] == "1":
            time.sleep(3600)


class Fails(Callback):
    """Rank 1 fails after step 3 as TEST_FAILS says of this start; rank 0 then waits for ever."""

    def on_step_end(self, trainer: LoopTrainer, metrics: Mapping[str, Any]) -> None:
        """Abort as NCCL does, or raise an error, if this is where."""
        kinds = os.environ.get("TEST_FAILS", "").split()
        start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if start >= len(kinds) or trainer.step != 3:
            return
        if os.environ["RANK"] == "1":
            if kinds[start] == "abort":
                os.abort()
            raise RuntimeError("rank 1's own")
        time.sleep(3600)


def tiny(steps: int = STEPS) -> LoopTrainer.Config:
    """Return a run of some steps; every second one is saved."""
    config = LoopTrainer.Config(
        total_tokens=steps * BATCH_WINDOWS * WINDOW_TOKENS,
        model=OuroOptions(size="debugmodel", n_layers=1, recurrent_steps=2),
        dataloader=TaskLoader.Config(task=Mano(5, 3)),
        learning_rate=Schedule.constant(1e-3),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(BATCH_WINDOWS * WINDOW_TOKENS)),
        adamw=AdamWConfig(beta2=0.98),
        callbacks=(Held(), Hung(), Fails()),
    )
    config.training.seq_len = WINDOW_TOKENS
    config.training.local_batch_size = 2
    config.checkpoint.interval = 100
    config.metrics.log_freq = 1
    return config


def one_run() -> LoopTrainer.Config:
    """A run that is saved at its end only, or when it is asked to stop."""
    return tiny()


def two_stages() -> Recipe:
    """A short stage, and one that starts from it."""
    return Recipe(
        name="two_stages",
        stages=[
            Stage(name="first", config=tiny(3)),
            Stage(name="second", parent="first", config=tiny(3)),
        ],
    )
