"""Depth reports: built from arrays, saved, and the newest found again."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from titan_loop.errors import RunFailedError, UserError
from titan_loop.evaluation.depth_report import DepthReport, require_gain, summarise_source
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import write_json


def report(step: int) -> DepthReport:
    n_bytes = np.array([10, 20, 30])
    nats = math.log(2) * n_bytes * np.array([[2.5], [2.0]])
    code = summarise_source(
        [1, 4],
        nats,
        n_bytes,
        {name: 60 * bits * math.log(2) for name, bits in (("unigram", 3.0), ("bigram", 2.5))},
        windows=5,
    )
    return DepthReport(
        step=step,
        tokens=100 * step,
        trained_recurrent_steps=4,
        sources={"c": code},
        baseline_tokens=1000,
    )


def test_changes_are_paired_over_the_units():
    """Documents that differ far more than depths do hide no difference between these."""
    n_bytes = np.full(40, 100.0)
    hard = np.linspace(1.0, 3.0, 40)
    nats = math.log(2) * n_bytes * np.stack([hard - 0.02, hard, hard - 0.01])
    source = summarise_source([4, 1, 2], nats, n_bytes, {}, windows=40)
    assert source.depths[4].high - source.depths[4].low > 0.2
    assert source.changes[1] == (0, 0, 0)
    assert source.changes[4] == pytest.approx((-0.02, -0.02, -0.02))
    assert source.changes[2] == pytest.approx((-0.01, -0.01, -0.01))


@pytest.mark.parametrize("field", ["changes", "nats", "n_bytes"])
def test_a_report_that_lacks_a_depth_or_a_unit_is_damaged(tmp_path: Path, field: str):
    path = report(1).save(RunDirectory(tmp_path))
    record = json.loads(path.read_text())
    source = record["sources"]["c"]
    (source if field == "changes" else source["units"])[field].pop(
        *(["4"] if field != "n_bytes" else [])
    )
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match="is damaged"):
        DepthReport.load(path)


def test_a_gain_over_the_unigram_model_can_be_required():
    require_gain(report(1), 0.15)  # 2.0 against 3.0 bits at the trained R = 4
    require_gain(report(1), 0.33)
    with pytest.raises(RunFailedError, match=r"2\.000 bits .* R = 4\) are 33\.3% below .* 3\.000"):
        require_gain(report(1), 0.34)
    require_gain(report(1), 0.19, baseline="bigram")  # 2.0 against 2.5 bits
    with pytest.raises(RunFailedError, match=r"are 20\.0% below the bigram model's 2\.500, not"):
        require_gain(report(1), 0.21, baseline="bigram")
    with pytest.raises(UserError, match="trained R = 3 among --depths"):
        require_gain(dataclasses.replace(report(1), trained_recurrent_steps=3), 0.15)


@pytest.mark.parametrize("value", ["x" * 1000, [], True, {}])
@pytest.mark.parametrize("name", ["windows", "baselines", "depths"])
def test_a_report_whose_numbers_are_none_is_refused_by_name(tmp_path: Path, name, value):
    odd = {"windows": value, "baselines": {"a": value}, "depths": {"1": [value] * 3}}
    units = {"n_bytes": [], "nats": {}}
    source = {"windows": 1, "n_bytes": 1, "baselines": {}, "depths": {}, "changes": {}}
    source |= {"units": units, name: odd[name]}
    record = {"step": 1, "tokens": 1, "trained_recurrent_steps": 1, "sources": {"all": source}}
    write_json(tmp_path / "x.json", record)
    with pytest.raises(UserError, match=r"x\.json is damaged .* is not a number"):
        DepthReport.load(tmp_path / "x.json")
