"""Llama blocks, looped: against a float64 reference, and against the dense model they unroll to."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.contracts.families import random_model
from tests.contracts.folders import opened
from tests.families.ouro.hugging_face.conftest import write_run
from titan_loop.checkpoint.upcycling import Upcycling
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.dense import DenseOptions
from titan_loop.models.family import build_decoder
from titan_loop.runs.conversion import upcycle_run

CLOSE = 2e-6  # float64, but the model's table of rotations is fp32


def reference(model: LoopDecoder, tokens_L: Tensor, steps: int) -> Tensor:
    """Return logits (L, V) of one window: Llama's equations, one layer after the other."""
    state = model.state_dict()
    options = model.config
    attention = options.layers[0].attention
    heads, kv_heads = attention.n_heads, attention.n_kv_heads or attention.n_heads
    width = options.dim // heads
    half = width // 2
    angles = torch.arange(len(tokens_L)).double()[:, None] * (
        attention.rope.theta ** (-torch.arange(half).double() / half)
    )

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + options.norm.eps).sqrt() * state[name]

    def rotate(x: Tensor) -> Tensor:
        a, b = x[..., :half], x[..., half:]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def layer(x: Tensor, index: int) -> Tensor:
        at = f"layers.{index}."
        normed = norm(x, f"{at}attention_norm.weight")
        q, k, v = (
            (normed @ state[f"{at}attention.qkv_linear.w{part}.weight"].T).unflatten(
                -1, (-1, width)
            )
            for part in "qkv"
        )
        q, k = rotate(q), rotate(k)
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qnh,knh->nqk", q, k) / width**0.5
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("nqk,knh->qnh", scores.softmax(-1), v).flatten(1)
        x = x + mixed @ state[f"{at}attention.wo.weight"].T
        normed = norm(x, f"{at}ffn_norm.weight")
        gate = F.silu(normed @ state[f"{at}feed_forward.w1.weight"].T)
        up = normed @ state[f"{at}feed_forward.w3.weight"].T
        return x + (gate * up) @ state[f"{at}feed_forward.w2.weight"].T

    first, last = options.prelude_layers, len(options.layers) - options.coda_layers
    x = state["tok_embeddings.weight"][tokens_L]
    for index in range(first):
        x = layer(x, index)
    for _ in range(steps):
        for index in range(first, last):
            x = layer(x, index)
        if options.norm_placement == "every_step":
            x = norm(x, "norm.weight")
    for index in range(last, len(options.layers)):
        x = layer(x, index)
    if options.norm_placement == "readout" or options.coda_layers:
        x = norm(x, "norm.weight")
    return x @ state["lm_head.weight"].T


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
def test_logits_are_those_of_the_equations(make_run, options):
    model = make_run(**options).model.double()
    tokens = torch.arange(3, 35) * 7 % 300
    output = model(tokens[None])
    logits = model.readout(output.hidden_RBLD[-1])[0]
    assert len(output.hidden_RBLD) == model.recurrent_steps
    torch.testing.assert_close(
        logits, reference(model, tokens, model.recurrent_steps), atol=CLOSE, rtol=0
    )


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
