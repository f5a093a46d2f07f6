"""`branch_scale` and `base_width`: factor, initial weights and rates they give."""

import math
from typing import Any

import pytest
import torch

from tests.contracts.families import random_model
from titan_loop.families.moe.model import MoEOptions
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.dense import DenseOptions
from titan_loop.models.family import build_decoder, decoder_config
from titan_loop.training.optimizers.container import LoopOptimizers
from titan_loop.training.optimizers.muon import MuonConfig

LAMBDA, STEPS = 0.5, 3
TOLERANCE = 1e-6  # in float64, but torchtitan's router is fp32
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 128


def make(kind: Any, **options: Any) -> LoopDecoder:
    return random_model(kind(recurrent_steps=STEPS, **options), 16)


@pytest.mark.parametrize(
    ("kind", "outputs"),
    [
        (DenseOptions, ("attention.wo.weight", "feed_forward.w2.weight")),
        (OuroOptions, ("attention_post_norm.weight", "ffn_post_norm.weight")),
        (MoEOptions, ("attention.wo.weight", "inner_experts.w2_EDF")),
    ],
)
def test_looped_layers_add_the_factor_times_as_much(kind, outputs):
    shape = {"n_layers": 4, "prelude_layers": 1}
    scaled = make(kind, branch_scale=LAMBDA, **shape)
    plain = make(kind, **shape)
    factor = LAMBDA / (STEPS * math.sqrt(3 / 12))
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.endswith(outputs) and not name.startswith("layers.0."):
                parameter *= factor
        for steps in (1, STEPS):  # R of a call does not change the factor
            found, want = (
                model(TOKENS, recurrent_steps=steps).hidden_RBLD[-1] for model in (scaled, plain)
            )
            torch.testing.assert_close(found, want, rtol=0, atol=TOLERANCE)


def test_a_checkpoint_keeps_its_factor():
    configs = [
        decoder_config(DenseOptions(branch_scale=LAMBDA, recurrent_steps=steps), max_seq_len=8)
        for steps in (2, 4)
    ]
    factors = [config.architecture["branch_factor"] for config in configs]
    assert factors[0] == pytest.approx(2 * factors[1])


def rates(optimizer: Any, scale: Any = "match_rms_adamw", **options: Any) -> dict[str, float]:
    model = build_decoder(MoEOptions(dense_layers=(1,), **options), max_seq_len=8)
    config = LoopOptimizers.Config()
    if optimizer == "muon":
        config.chosen = MuonConfig(scale=scale)
    optimizers = config.build(model_parts=[model])
    optimizers.set_learning_rate(1.0)
    return {
        name: group["lr"]
        for each in optimizers.optimizers
        for group in each.param_groups
        for name in group["param_names"]
    }


@pytest.mark.parametrize(
    ("optimizer", "scale", "hidden"),
    [
        ("adamw", "match_rms_adamw", 1 / 4),
        ("muon", "match_rms_adamw", 1 / 2),
        ("muon", "original", 1.0),
        ("muon", "sphere", 1.0),
    ],
)
def test_matrices_learn_by_the_width_rule(optimizer, scale, hidden):
    found = rates(optimizer, scale, base_width=16, dim=64)
    for name in (
        "layers.0.attention.wo.weight",
        "layers.0.feed_forward.w1.weight",
        "layers.1.moe.routed_experts.inner_experts.w1_EFD",
    ):
        assert found[name] == pytest.approx(hidden)
    assert found["lm_head.weight"] == pytest.approx(1 / 4)  # AdamW's in both
    assert found["tok_embeddings.weight"] == found["norm.weight"] == 1.0
    assert {*rates(optimizer, scale, dim=64).values()} == {1.0}


@pytest.mark.parametrize("kind", [OuroOptions, DenseOptions, MoEOptions])
def test_matrices_start_smaller_and_tables_do_not(kind):
    def deviations(**options: Any) -> dict[str, float]:
        torch.manual_seed(0)
        model = build_decoder(kind(**options), max_seq_len=8)
        return {name: p.std().item() for name, p in model.named_parameters() if p.ndim > 1}

    plain, narrow = deviations(), deviations(base_width=16)  # of width 64
    tables = {"tok_embeddings.weight", "exit_gate.weight"}
    for name, deviation in plain.items():
        expected = deviation if name in tables else deviation / 2
        assert narrow[name] == pytest.approx(expected), name
