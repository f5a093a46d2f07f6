"""Settings under which a run could not rewind."""

import pytest

from titan_loop.checkpoint.manager import LoopCheckpointManager
from titan_loop.training.stability.config import StabilityConfig


@pytest.mark.parametrize(("interval", "needed"), [(1, 64), (20, 5), (62, 3), (63, 2), (1000, 2)])
def test_the_fix_names_the_fewest_checkpoints_that_do(interval, needed):
    config, checkpoint = StabilityConfig(skip_spikes=True), LoopCheckpointManager.Config()
    checkpoint.interval, checkpoint.keep_latest_k = interval, 1
    (refusal,) = config.refusals(checkpoint=checkpoint)
    assert str(refusal).endswith(f"; keep at least {needed}, or all (0)")
    checkpoint.keep_latest_k = needed
    assert not [*config.refusals(checkpoint=checkpoint)]
    config.skip_spikes = False
    checkpoint.keep_latest_k = 1
    assert not [*config.refusals(checkpoint=checkpoint)]
