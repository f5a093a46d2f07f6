"""Records of norms: what they hold, how they read, and what is warned of."""

from pathlib import Path

import pytest
import torch

from tests.support.tiny import tiny_config, train_run
from titan_loop.analysis.report import write_report
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.stability.norms import (
    GROWTH,
    WeightNorms,
    growth_warning,
    norms_line,
    norms_record,
)

NAN = float("nan")


def record() -> dict:
    # Two layers, R = 2 of 3: four elements of 1, 2, 3 and 4 each.
    sums = torch.zeros(4, 4, 2)
    sums[:, 1] = torch.tensor([[4.0, 16.0], [4.0, 4.0], [0.04, 0.16], [4.0, 4.0]])
    sums[:, 2] = torch.tensor([[36.0, 64.0], [4.0, 4.0], [0.36, 0.64], [4.0, 4.0]])
    weights = WeightNorms(torch.nn.Identity())
    weights.gradient = {"0": torch.tensor(0.5), "lm_head": torch.tensor(0.25)}
    weights.weight = {"0": torch.tensor(10.0), "lm_head": torch.tensor(20.0)}
    weights.update = {"0": torch.tensor(0.1), "lm_head": torch.tensor(1.0)}
    return norms_record(step=7, tokens=70, recurrent_steps=2, sums=sums, elements=400, of=weights)


def test_a_record_has_the_norms_of_the_whole_batch():
    found = record()
    assert found["state_rms"][1:] == [[1, 2], [3, 4]]
    # 400 elements in the global batch, of which the sums saw 4 on each of 100 ranks.
    assert found["state_gradient"][1:] == [pytest.approx([2, 4]), pytest.approx([6, 8])]
    assert len(found["state_rms"]) == 3
    assert norms_line(found) == (
        "norms at step 7: states 2 after recurrent step 1, 4 after 2; largest gradient 0.5 "
        "(layer 0); largest update 0.05 of its weights (lm_head)"
    )


def test_growth_with_depth_is_warned_of():
    rows = [[NAN, NAN], [1.0, 2.0], [1.0, 2.0 * GROWTH]]
    assert growth_warning(rows) is None
    rows[2][1] *= 1.01
    assert "layer 1 returns 2 in recurrent step 1 and 20.2 in step 2" in str(growth_warning(rows))
    assert growth_warning(rows[:2]) is None  # R = 1 has no depth
    assert growth_warning([[NAN], [NAN], [NAN]]) is None
    assert growth_warning([[NAN] * 2, [0.0, 1.0], [5.0, 1.0]]) is None  # no ratio to 0
    assert "layer 0 returns" in str(growth_warning([[NAN] * 2, [1.0, 1.0], [99.0, 50.0]]))


def test_a_run_writes_its_norms_and_warns_once(
    alone: None, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("titan_loop.training.stability.norms.GROWTH", 0.1)
    config = tiny_config(source, tmp_path, steps=5)
    config.stability.norms_interval = 2
    train_run(config)
    found = RunDirectory(tmp_path).read_norms()
    assert [each["step"] for each in found] == [2, 4]
    assert found[0]["state_rms"][0] == [None] * len(found[0]["state_rms"][1])
    assert all(all(row) for row in found[0]["state_gradient"][1:])
    assert all(found[0]["update"].values())
    assert (
        "<h2>Norms by layer and recurrent step</h2>"
        in write_report(RunDirectory(tmp_path)).read_text()
    )
    log = RunDirectory(tmp_path).log_txt.read_text()
    assert log.count("norms at step") == 2
    assert log.count("states grow with depth") == 1
