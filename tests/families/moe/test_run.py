"""Runs of a mixture: loads are recorded and experts balanced."""

import pytest
import torch

from tests.contracts.runs import records, whole_run
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.runs.saved_run import SavedRun

RATE = 0.01
BIAS = "layers.1.moe.expert_bias_SE"


@pytest.mark.usefixtures("alone")
def test_loads_are_recorded_and_move_the_biases(tmp_path_factory):
    whole = whole_run("moe/experts", tmp_path_factory)
    found = records(whole)
    first, last = found[1], found[4]
    assert {name for name in first if "load/" in name} == {
        f"experts/load/layer_2_step_{step}" for step in (1, 2, 3, 4)
    }
    assert "experts/load/layer_2_step_3" not in last  # R was 2
    assert {"experts/balance", "experts/router_z", "experts/max_load", "experts/unused"} <= {*last}
    # One update of the bias a training step, over all visits: the sum of their directions.
    expected = torch.zeros(4)
    for record in found.values():
        loads = torch.tensor([value for name, value in record.items() if "load/" in name])
        assert loads.sum(1).tolist() == pytest.approx([4.0] * len(loads))
        direction = (loads.sum(0).mean() - loads.sum(0)).sign()
        expected += RATE * (direction - direction.mean())
    saved = CheckpointReader(SavedRun.open(whole).checkpoint().path).read(BIAS)
    torch.testing.assert_close(saved[0], expected, atol=1e-6, rtol=0)
