"""A recipe of the toy family on the toy task: `titan-loop train tests.families.toy_recipe:toy`."""

from tests.data.tasks.toy_task import Backwards
from tests.families.toy_family import ToyOptions
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer


def toy() -> LoopTrainer.Config:
    config = LoopTrainer.Config(
        dump_folder="runs/toy",
        total_tokens=6 * 8 * 32,
        model=ToyOptions(attention="sdpa"),
        dataloader=TaskLoader.Config(task=Backwards()),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(8 * 32)),
    )
    config.training.seq_len = 32
    config.training.local_batch_size = 2
    config.checkpoint.interval = 2
    config.metrics.log_freq = 1
    return config
