"""The small study's arms cost what its page says."""

from dataclasses import replace

import pytest

from titan_loop.models.family import build_decoder
from titan_loop.recipes.registry import load_recipe
from titan_loop.training.chosen_model import stage_architecture
from titan_loop.training.flop_budget import mean_flops
from train_configs.moe import EXPERT_WIDTH, RATES, TABLES, TOP_K

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


def test_every_cell_is_an_arm():
    for recipe, tables in TABLES.items():
        stages = {stage.name for stage in load_recipe(recipe).stages}
        for table in tables:
            cells = {
                table.address(row, column)[0]["stage"]
                for row in table.rows
                for column in table.columns
            }
            assert cells == stages


def test_settings_have_equal_flops_and_differ_in_what_they_name():
    flops, bases = {}, {}
    for stage in load_recipe("looped_moe_settings").stages:
        model = replace(stage.config.model, vocab_size=1024)
        config = replace(stage.config, model=model)
        flops[stage.name] = mean_flops(config, stage_architecture(config)).total
        bases[stage.name] = stage.config
    assert [*flops.values()] == pytest.approx([flops["dense_base"]] * len(flops), rel=0.02)
    for arm in EQUAL_FLOPS:
        for name, value in RATES.items():
            config = bases[f"{arm}_{name}"]
            assert config.learning_rate(150_000) == value
            rest = replace(config, learning_rate=bases[f"{arm}_base"].learning_rate)
            assert rest == bases[f"{arm}_base"]
    sparse = [config.model for name, config in bases.items() if "moe" in name]
    assert {model.top_k * model.hidden_dim for model in sparse} == {TOP_K * EXPERT_WIDTH}
