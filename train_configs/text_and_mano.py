"""A small model on text and on arithmetic: a run that the studies of several families share.

The text is the quick start's, the arithmetic the one of `physics_exams`.
"""

from typing import NamedTuple

from titan_loop.data.load.batches import GlobalBatchLoader
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.models.family import ModelOptions
from titan_loop.training.evaluation_config import HeldOutConfig, SuiteConfig
from titan_loop.training.trainer import LoopTrainer

from .physics.exams import MANO
from .runs import cosine, run, text


class Data(NamedTuple):
    """Data, tokens of a window, windows of a step, and tokens of a run."""

    source: GlobalBatchLoader.Config
    window: int
    windows: int
    tokens: int


TASKS = {
    "text": Data(text(), 256, 4, 1_500_000),
    "mano": Data(TaskLoader.Config(task=MANO), 64, 16, 3_600_000),
}


def small_run(data: Data, model: ModelOptions, rate: float, optimizer: str) -> LoopTrainer.Config:
    """Return a run that is scored at its model's R; `rate` is the largest."""
    steps = model.recurrent_steps
    assert steps is not None
    config = run(
        model,
        data.source,
        tokens=data.tokens,
        window=data.window,
        windows=data.windows,
        rate=cosine(rate, data.tokens),
        steps=steps,
        held_out=HeldOutConfig(depths=[steps], windows=128),
        save_every=10_000,
        log_every=50,
        optimizer=optimizer,
    )
    if task := data.source.generated_task():
        config.suite = SuiteConfig(interval=1_000, tasks=[task.name], depths=[steps], questions=500)
        config.adamw.beta2 = 0.98
    return config
