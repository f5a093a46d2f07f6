"""A rehearsed stage of the families with a decoded channel moves what plan says."""

import pytest

from tests.planning.test_rehearsal import as_before, assert_as_planned, rehearsed, stage  # noqa: F401
from titan_loop.families.discoloop.model import DiscoLoopOptions
from titan_loop.families.discoloop.ponder import PonderOptions


@pytest.mark.parametrize("options", [DiscoLoopOptions, PonderOptions])
def test_a_decoded_channel_moves_what_plan_says(options):
    config = stage()
    config.model = options(vocab_size=512)
    assert_as_planned(rehearsed(config))
