"""A rehearsed stage of the families with a decoded channel reduces every weight once."""

import pytest

from tests.planning.test_rehearsal import (  # noqa: F401
    as_before,
    assert_every_weight_is_reduced_once,
    stage,
)
from titan_loop.families.discoloop.model import DiscoLoopOptions
from titan_loop.families.discoloop.ponder import PonderOptions
from titan_loop.training.schedule import Schedule


@pytest.mark.parametrize("options", [DiscoLoopOptions, PonderOptions])
def test_a_decoded_channel_reduces_every_weight_once(options):
    config = stage()
    config.model = options(vocab_size=512, n_layers=1)
    config.recurrence.steps = Schedule.constant(2)
    assert_every_weight_is_reduced_once(config)
