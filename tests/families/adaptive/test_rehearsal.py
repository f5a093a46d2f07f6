"""A rehearsed stage of layers that loop reduces every weight once."""

from torchtitan.distributed.activation_checkpoint import SelectiveAC

from tests.planning.test_rehearsal import (  # noqa: F401
    as_before,
    assert_every_weight_is_reduced_once,
    stage,
)
from titan_loop.families.adaptive.model import AdaptiveOptions
from titan_loop.families.adaptive.objective import PonderCostLoss
from titan_loop.training.schedule import Schedule


def test_layers_that_loop_reduce_every_weight_once():
    """Under selective checkpointing, which recomputes FSDP units inside of a layer."""
    config = stage()
    config.model = AdaptiveOptions(max_iterations=2, n_layers=1, local_slots=5, vocab_size=512)
    config.recurrence.steps, config.loss = Schedule.constant(1), PonderCostLoss.Config()
    config.activation_checkpoint = SelectiveAC.Config()
    assert_every_weight_is_reduced_once(config)
