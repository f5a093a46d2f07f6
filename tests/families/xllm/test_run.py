"""Runs with drawn and learned depths."""

from pathlib import Path

import numpy as np
import pytest

from tests.contracts.runs import records, whole_run
from tests.families.xllm.contract import DEPTHS, STEPS, drawn_run
from tests.support.tiny import train_run
from titan_loop.errors import UserError
from titan_loop.families.xllm.depth import DrawnDepth
from train_configs.xllm.analysis import learned_depths


@pytest.mark.usefixtures("alone")
def test_the_learned_distribution_is_shown_as_it_was_at_each_checkpoint(tmp_path_factory):
    whole = whole_run("xllm/learned", tmp_path_factory)
    recorded = records(whole)
    assert len({record["recurrent_steps"] for record in recorded.values()}) > 1
    late, early = (learned_depths(path) for path in (whole, whole / "checkpoints/step-6"))
    assert [*late.record["probabilities"]] == ["2", "4", "6", "8"]
    assert [*early.record["probabilities"]] == ["2", "4", "6"]
    for step, probabilities in late.record["probabilities"].items():
        depths = np.arange(1, 7)
        mean = recorded[int(step)]["depth_prior/mean"]
        entropy = recorded[int(step)]["depth_prior/entropy"]
        assert probabilities @ depths == pytest.approx(mean)
        assert -sum(p * np.log(p) for p in probabilities) == pytest.approx(entropy)
    # The quarter and the half of eight records, counted from the first.
    for moment, step in (("start", 1), ("quarter", 3), ("half", 5), ("end", 8)):
        for name in ("mean", "entropy"):
            value = recorded[step][f"depth_prior/{name}"]
            assert late.results[f"learned_depths/{name}/{moment}"] == value
    assert early.results["learned_depths/mean/end"] == recorded[6]["depth_prior/mean"]
    assert len({record["depth_prior/mean"] for record in recorded.values()}) > STEPS - 3
    assert all(path.is_file() for path in late.save())


@pytest.mark.usefixtures("alone")
def test_a_run_has_the_depths_that_are_drawn(tmp_path: Path):
    drawn = DrawnDepth(probabilities=DEPTHS)
    train_run(drawn_run(tmp_path / "run", drawn))
    depths = [record["recurrent_steps"] for record in records(tmp_path / "run").values()]
    assert depths == [drawn.draw(step) for step in range(STEPS)]
    with pytest.raises(UserError, match="no learned distribution of depths; train with"):
        learned_depths(tmp_path / "run")
