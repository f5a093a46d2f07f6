"""The small study's arms cost what its page says."""

from dataclasses import replace

import pytest

from titan_loop.models.family import build_decoder
from titan_loop.recipes.registry import load_recipe
from titan_loop.training.chosen_model import stage_architecture
from titan_loop.training.flop_budget import mean_flops
from train_configs.moe.recipes import EXPERT_WIDTH, RATES, SETTINGS, TOP_K

EQUAL_FLOPS = ("dense", "looped_dense", "moe", "looped_moe")
EQUAL_PARAMETERS = ("moe", "looped_moe", "dense_parameters", "looped_dense_parameters")


def test_arms_have_equal_flops_and_equal_parameters():
    flops, parameters = {}, {}
    for stage in load_recipe("looped_moe_small").stages:
        model = replace(stage.config.model, vocab_size=1024)
        config = replace(stage.config, model=model)
        flops[stage.name] = mean_flops(config, stage_architecture(config)).total
        decoder = build_decoder(model, max_seq_len=256, device="meta")
        parameters[stage.name] = sum(p.numel() for p in decoder.parameters())
    assert [flops[arm] for arm in EQUAL_FLOPS] == pytest.approx([flops["dense"]] * 4, rel=0.01)
    assert [parameters[arm] for arm in EQUAL_PARAMETERS] == pytest.approx(
        [parameters["moe"]] * 4, rel=0.01
    )


def test_settings_cost_the_same_flops_and_rates_are_all_that_differs():
    configs = {stage.name: stage.config for stage in load_recipe("looped_moe_small").stages}
    flops = []
    for name in (*EQUAL_FLOPS, *SETTINGS):
        config = replace(configs[name], model=replace(configs[name].model, vocab_size=1024))
        flops.append(mean_flops(config, stage_architecture(config)).total)
    assert flops == pytest.approx([flops[0]] * len(flops), rel=0.02)
    for arm in EQUAL_FLOPS:
        for rate, value in RATES.items():
            other = configs[f"{arm}_{rate}"]
            assert other.learning_rate(150_000) == value
            assert replace(other, learning_rate=configs[arm].learning_rate) == configs[arm]
    mixtures = [configs[name].model for name in SETTINGS if "moe" in name]
    assert {model.top_k * model.hidden_dim for model in mixtures} == {TOP_K * EXPERT_WIDTH}
