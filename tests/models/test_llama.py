"""Llama blocks, looped: against a float64 reference, and against the dense model they unroll to."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.contracts.families import random_model
from tests.contracts.folders import opened
from tests.families.ouro.hugging_face.conftest import write_run
from tests.models.reference import reference_forward
from titan_loop.checkpoint.upcycling import Upcycling
from titan_loop.models.dense import DenseOptions
from titan_loop.models.family import build_decoder
from titan_loop.runs.conversion import upcycle_run

CLOSE = 2e-6  # float64, but the model's table of rotations is fp32


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_placement": "every_step", "recurrent_steps": 2},
        {"n_layers": 4, "prelude_layers": 1, "coda_layers": 1},
        {"n_kv_heads": 4, "tie_weights": True, "norm_eps": 1e-3, "rope_theta": 500.0},
        {"recurrent_steps": 1},
    ],
    ids=["loop", "norm between", "prelude and coda", "tied", "dense"],
)
def test_states_are_those_of_the_equations(make_run, options):
    model = make_run(**options).model.double()
    tokens = torch.arange(3, 35) * 7 % 300
    output = model(tokens[None])
    want, _ = reference_forward(
        model,
        tokens[None],
        torch.arange(len(tokens))[None],
        model.recurrent_steps,
        norm_at_readout=model.norm_placement == "readout",
        outside=(model.config.prelude_layers, model.config.coda_layers),
    )
    torch.testing.assert_close([*output.hidden_RBLD], want, atol=CLOSE, rtol=0)


def test_branches_start_small_in_their_matrices():
    model = build_decoder(DenseOptions(n_layers=8), max_seq_len=8)
    layer = model.layers["0"]
    weights = (layer.attention.wo.weight, layer.feed_forward.w1.weight)
    out, inside = (float(weight.detach().std()) for weight in weights)
    assert out / inside == pytest.approx((2 * 8) ** -0.5, rel=0.1)


@torch.no_grad()
@pytest.mark.parametrize("of_layers", [{}, {"windowed_layers": (0,), "unrotated_layers": (1,)}])
def test_twice_the_layers_are_twice_the_steps(tmp_path: Path, of_layers):
    """Nothing stands between two steps, not even a norm."""
    options = DenseOptions(n_layers=2, recurrent_steps=4, window=4, **of_layers)
    made = random_model(options, 64).float()
    write_run(tmp_path / "run", options, made)  # type: ignore[arg-type]
    upcycle_run(tmp_path / "run", tmp_path / "deep", Upcycling(2 * len(made.layers)), ["test"])
    tokens = torch.arange(40)[None] * 7 % 128
    want = made(tokens, recurrent_steps=4).hidden_RBLD[-1]
    assert torch.equal(opened(tmp_path / "deep")(tokens, recurrent_steps=2).hidden_RBLD[-1], want)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["none", "learned", "relative", "deberta", "bias", "rope"])
def test_dense_blocks_have_every_kind_of_positions(kind):
    """One layer without positions reads earlier tokens as a set."""
    more = {"learned": {"learned_positions": 32}, "rope": {}, "none": {}}
    more = more.get(kind, {"relative_window": 16})
    options = DenseOptions(n_layers=1, recurrent_steps=1, positions=kind, **more)
    model = random_model(options, 32)
    ids = torch.arange(12)[None] * 7 % 128
    swapped = ids[:, [1, 0, *range(2, 12)]]
    first, turned = (model(each).hidden_RBLD[-1][0, -1] for each in (ids, swapped))
    assert ((first - turned).abs().max() < 1e-9) == (kind == "none")
    if kind == "bias":  # a large one decides which key is read, at any scale of the scores
        model.layers["0"].attention.distance_scores.bias.copy_(-99.0 * (torch.arange(17) != 1))
        scaled = build_decoder(replace(options, attention_scale=1e-6), max_seq_len=32).double()
        scaled.load_state_dict(model.state_dict())
        one, other = (each(ids).hidden_RBLD[-1][:, 1:] for each in (model, scaled))
        torch.testing.assert_close(one, other)
