"""A rehearsed stage of the family reduces every weight once."""

from tests.planning.test_rehearsal import (  # noqa: F401
    as_before,
    assert_every_weight_is_reduced_once,
    stage,
)
from tests.support.tiny import SEQ_LEN
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.mano import Mano
from titan_loop.families.recurrent_depth.model import RecurrentDepthOptions


def test_gpt2_blocks_reduce_every_weight_once():
    config = stage()
    config.dataloader = TaskLoader.Config(task=Mano(5, 3))
    config.model = RecurrentDepthOptions(
        positions="learned", learned_positions=SEQ_LEN, vocab_size=512
    )
    assert_every_weight_is_reduced_once(config)
