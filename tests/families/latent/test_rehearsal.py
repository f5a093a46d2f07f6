"""A rehearsed stage of latent steps reduces every weight once."""

import pytest

from tests.planning.test_rehearsal import (  # noqa: F401
    as_before,
    assert_every_weight_is_reduced_once,
    stage,
)
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.families.latent.model import LatentOptions
from titan_loop.families.latent.objective import LatentSupervision
from titan_loop.training.schedule import Schedule
from train_configs.latent.task import DagArithmetic


@pytest.mark.parametrize("state", ["discrete", "continuous"])
def test_latent_steps_reduce_every_weight_once(state):
    """Attention weights, and the padding of two rows on eight ranks."""
    config = stage()
    task = DagArithmetic(modulus=5, nodes=6, leaves=3, names=12, most_depth=4, test_nodes=(5, 9))
    config.dataloader = TaskLoader.Config(task=task, all_targets=True)
    config.training.seq_len, config.loss = 256, LatentSupervision.Config()
    config.model = LatentOptions(size="debugmodel", n_layers=1, state=state, dropout=0.1)
    config.recurrence.steps = Schedule.constant(2)
    config.batch.global_batch_tokens = Schedule.constant(8 * 256)
    config.total_tokens = 6 * 8 * 256
    assert_every_weight_is_reduced_once(config)
