"""A rehearsed stage of the family moves what plan says."""

from tests.planning.test_rehearsal import as_before, assert_as_planned, rehearsed, stage  # noqa: F401
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.mano import Mano
from titan_loop.families.recurrent_depth.model import RecurrentDepthOptions
from titan_loop.testing.tiny import SEQ_LEN


def test_gpt2_blocks_move_what_plan_says():
    config = stage()
    config.dataloader = TaskLoader.Config(task=Mano(5, 3))
    config.model = RecurrentDepthOptions(
        positions="learned", learned_positions=SEQ_LEN, vocab_size=512
    )
    assert_as_planned(rehearsed(config))
