"""A rehearsed stage of layers that loop moves what plan says."""

from torchtitan.distributed.activation_checkpoint import SelectiveAC

from tests.planning.test_rehearsal import as_before, assert_as_planned, rehearsed, stage  # noqa: F401
from titan_loop.families.adaptive.model import AdaptiveOptions
from titan_loop.families.adaptive.objective import PonderCostLoss
from titan_loop.training.schedule import Schedule


def test_layers_that_loop_move_what_plan_says():
    """Under selective checkpointing, which recomputes FSDP units inside of a layer."""
    config = stage()
    config.model = AdaptiveOptions(max_iterations=5, local_slots=5, vocab_size=512)
    config.recurrence.steps, config.loss = Schedule.constant(1), PonderCostLoss.Config()
    config.held_out.depths = [1]
    config.activation_checkpoint = SelectiveAC.Config()
    assert_as_planned(rehearsed(config))
