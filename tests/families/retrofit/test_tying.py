"""Tied layers: exact at full rank, best of their rank below, averages at rank 0."""

import pytest
import torch

from tests.families.retrofit.conftest import Made, Retrofit, logits
from titan_loop.families.retrofit.tying import low_rank
from titan_loop.runs.saved_run import SavedRun

ALL = ("--prelude", 0, "--core", 2, "--coda", 0)
INNER = ("--prelude", 1, "--core", 1, "--coda", 1)


@pytest.mark.parametrize("spans", [ALL, INNER], ids=["all layers", "prelude and coda"])
def test_at_full_rank_the_loop_is_the_dense_model(dense: Made, retrofit: Retrofit, spans: tuple):
    model = retrofit("tied", *spans, "--rank", 64).model
    assert len(model.layers) == 4 - (2 if spans == ALL else 1)
    torch.testing.assert_close(logits(model, 2), logits(dense.model, 1), atol=2e-4, rtol=0)


def test_rank_zero_is_a_plain_loop_of_averages_with_folded_gains(dense: Made, retrofit: Retrofit):
    looped = retrofit("tied", *ALL)
    assert SavedRun.open(looped.run).model_options.family == "nanbeige"
    old, new = dense.model.state_dict(), looped.model.state_dict()
    gains = [old[f"layers.{layer}.ffn_norm.weight"] for layer in (1, 3)]
    wide = [old[f"layers.{layer}.feed_forward.w1.weight"] for layer in (1, 3)]
    want = (wide[0] * gains[0] + wide[1] * gains[1]) / 2
    torch.testing.assert_close(new["layers.1.feed_forward.w1.weight"], want)
    back = [old[f"layers.{layer}.feed_forward.w2.weight"] for layer in (0, 2)]
    torch.testing.assert_close(new["layers.0.feed_forward.w2.weight"], (back[0] + back[1]) / 2)
    assert torch.equal(new["layers.1.ffn_norm.weight"], torch.ones(64))
    assert torch.equal(new["norm.weight"], old["norm.weight"])


@pytest.mark.parametrize("rank", [1, 5, 9])
def test_adapters_are_the_best_of_their_rank(rank: int):
    torch.manual_seed(1)
    matrix = torch.randn(6, 11, dtype=torch.float64)
    down, up = low_rank(matrix, rank)
    assert (down.shape, up.shape) == ((rank, 11), (6, rank))
    rest = torch.linalg.svdvals(matrix)[rank:]
    error = (up @ down - matrix).norm()
    torch.testing.assert_close(error, rest.square().sum().sqrt(), atol=1e-12, rtol=0)
