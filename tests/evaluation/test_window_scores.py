"""Held-out scoring: one implementation, whatever reads the model and whoever shares the windows."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX

from tests.inference.reference import make_model
from tests.support.tiny import SEQ_LEN
from titan_loop.data.source_card import SourceCard
from titan_loop.errors import UserError
from titan_loop.evaluation.readings import depth_readings
from titan_loop.evaluation.suites import NotAskedError
from titan_loop.evaluation.window_scores import (
    WindowScores,
    at_depths,
    at_readings,
    open_run,
    open_sources,
    score_windows,
    sum_windows,
    summarise,
    with_total,
)
from titan_loop.models.decoder import LoopDecoder
from titan_loop.runs.saved_run import SavedRun

DEPTHS = [1, 3, 6]
CPU = torch.device("cpu")
# Other orders of the same fp32 sums.
RELATIVE_TOLERANCE = 1e-5


@pytest.fixture
def model(source: Path) -> LoopDecoder:
    return make_model(seed=1, vocab_size=SourceCard.read(source).vocab_size)


def test_both_forwards_agree_with_the_definition(source: Path, model: LoopDecoder):
    (windows,) = open_sources([str(source)], seq_len=SEQ_LEN, count=5).values()
    sums = sum_windows(windows, at_depths(model, DEPTHS), device=CPU, batch_windows=2)
    streamed = WindowScores.of(windows, sums)
    read = score_windows(windows, at_readings(model, depth_readings(DEPTHS)), device=CPU)
    valid = windows.labels != IGNORE_INDEX
    with torch.no_grad():
        output = model(windows.input, windows.positions, recurrent_steps=max(DEPTHS))
    for scores in (streamed, read):
        for row, depth in enumerate(DEPTHS):
            log_prob = model.readout(output.hidden_RBLD[depth - 1]).double().log_softmax(-1)
            nats = -log_prob.gather(-1, windows.labels.clamp(min=0)[..., None])[..., 0]
            expected = torch.where(valid, nats, 0.0).sum(1).detach().numpy()
            assert scores.nats_PW[row] == pytest.approx(expected, rel=RELATIVE_TOLERANCE)
            assert (scores.steps_PW[row] == depth * valid.sum(1).numpy()).all()
        assert (scores.tokens_W == valid.sum(1).numpy()).all()
        assert (scores.bytes_W == windows.label_bytes.sum(1).numpy()).all()


def scores_of(nats: float, tokens: int, n_bytes: int) -> WindowScores:
    return WindowScores(
        np.full((1, 3), nats), np.full((1, 3), 2.0 * tokens),
        np.full(3, tokens), np.full(3, n_bytes), np.arange(3),
    )  # fmt: skip


def test_windows_of_a_document_are_one_unit_of_the_bootstrap():
    """Two windows of every document say no more than one."""
    rng = np.random.default_rng(0)
    nats, n_bytes = rng.uniform(10, 90, (2, 12)), rng.integers(10, 90, 12)
    once = WindowScores(nats, nats, n_bytes, n_bytes, np.arange(12))
    twice = WindowScores(*(np.repeat(part, 2, axis=-1) for part in once))
    for found, expected in zip(twice.by_unit(), once.by_unit(), strict=True):
        np.testing.assert_allclose(found, 2 * expected)
    few = WindowScores(*(np.repeat(part[..., :9], 2, axis=-1) for part in once))
    assert few.by_unit()[1].shape == (18,), "nine documents are too few to resample"
    both = with_total({"code": twice, "prose": twice})["all"]
    assert both.by_unit()[1].shape == (24,), "a number means another document in another source"


def test_summary_and_total():
    code, prose = scores_of(math.log(2) * 20, 5, 10), scores_of(math.log(2) * 40, 15, 10)
    result = summarise(code, ["static:2"])["static:2"]
    assert result.metrics["bits_per_byte"] == pytest.approx(2.0)
    assert result.metrics["bits_per_byte_low"] == pytest.approx(2.0)
    assert result.metrics["nats_per_token"] == pytest.approx(4 * math.log(2))
    assert result.mean_steps == 2.0
    together = with_total({"code": code, "prose": prose})
    assert list(together) == ["code", "prose", "all"]
    total = summarise(together["all"], ["static:2"])["static:2"].metrics
    assert total["bits_per_byte"] == pytest.approx(3.0)
    assert total["nats_per_token"] == pytest.approx(3 * math.log(2))
    assert with_total({"code": code}) == {"code": code}


def test_the_held_out_text_of_a_run_or_of_sources_that_are_named(
    text_run: Path, source: Path, monkeypatch
):
    run = SavedRun.open(text_run)
    twice = open_run(run, count=2, sources=(source.name, source.name), seq_len=SEQ_LEN // 2)
    named = twice[source.name]
    assert named.input.shape == (2, SEQ_LEN // 2)
    with pytest.raises(UserError, match=r"--sources source_ is neither .*; nearest: source"):
        open_run(run, count=2, sources=("source_",))
    with pytest.raises(UserError, match="windows=0 must be at least 1"):
        open_run(run, count=0)
    monkeypatch.setattr(SavedRun, "sources", property(lambda run: []))
    with pytest.raises(NotAskedError, match="it has no held-out text; name prepared sources"):
        open_run(run, count=2)
    assert open_run(run, count=1, sources=(str(source),))[source.name].input.shape[0] == 1
