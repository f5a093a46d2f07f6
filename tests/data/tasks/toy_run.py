"""A run of a few steps on the toy task."""

from pathlib import Path

from tests.data.tasks.toy_task import Backwards
from tests.support.tiny import tiny_config
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.training.evaluation_config import SuiteConfig
from titan_loop.training.trainer import LoopTrainer

TASK = Backwards(letters=7)  # 8 tokens, which two ranks can share


def toy_config(run: Path, *, steps: int = 6) -> LoopTrainer.Config:
    """Return a run of the toy task."""
    config = tiny_config(Path("none"), run, steps=steps)
    config.dataloader = TaskLoader.Config(task=TASK)
    config.suite = SuiteConfig(interval=0, tasks=[TASK.name], depths=[1, 3], questions=12)
    return config
