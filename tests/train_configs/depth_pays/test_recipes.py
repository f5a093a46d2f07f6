"""The arms differ in what their names say, and in nothing else."""

import dataclasses

import pytest

from titan_loop.models.family import build_decoder
from titan_loop.training.chosen_model import stage_architecture
from titan_loop.training.flop_budget import mean_flops, within_budget
from train_configs.depth_pays.recipes import (
    ARMS,
    LATE_FROM,
    LATE_TURN,
    TOTAL_FLOPS,
    TOTAL_TOKENS,
    TUNED,
    TUNED_RATES,
    depth_pays,
    depth_pays_tuned,
)


def parameters(name: str) -> int:
    options = depth_pays().stage(name).config.model
    model = build_decoder(dataclasses.replace(options, vocab_size=1024), max_seq_len=256)
    gate = 0 if model.exit_gate is None else sum(p.numel() for p in model.exit_gate.parameters())
    return sum(p.numel() for p in model.parameters()) - gate


def test_arms_of_one_comparison_have_the_same_parameters():
    alike = [name for name in ARMS if "n_layers" not in ARMS[name]]
    injected = {name for name in alike if ARMS[name].get("injection") == "diagonal"}
    (counted,) = {parameters(name) - 96 * (name in injected) for name in alike}
    layer = parameters("two_layers") - counted
    assert parameters("dense") - counted == 3 * layer
    assert parameters("grown_outside") - counted == 2 * layer


def test_arms_of_the_same_flops_spend_them():
    stages = [depth_pays().stage(name) for name in ARMS if ARMS[name].get("same_flops")]
    configs = [within_budget(stage.config) for stage in [*stages, depth_pays().stage("last_step")]]
    for config in configs:
        spent = mean_flops(config, stage_architecture(config)).total * config.total_tokens
        assert spent == pytest.approx(TOTAL_FLOPS, rel=1e-3)


@pytest.mark.parametrize(("name", "turns"), [("late_5_6_muon", [4, 5, 6]), ("late_8_muon", [4, 8])])
def test_late_arms_loop_as_the_fixed_ones_and_then_change_r_by_turns(name, turns):
    steps = depth_pays().stage(name).config.recurrence.steps
    assert {steps(tokens) for tokens in range(0, LATE_FROM, LATE_TURN)} == {4}
    places = range(LATE_FROM, TOTAL_TOKENS, LATE_TURN)
    assert [steps(tokens) for tokens in places] == (turns * len(places))[: len(places)]
    assert len(places) >= 12 * len(turns)


def test_tuned_arms_have_every_rate_and_the_same_compute_as_their_names_say():
    configs = {stage.name: within_budget(stage.config) for stage in depth_pays_tuned().stages}
    assert len(configs) == len(TUNED) * len(TUNED_RATES)
    flops = {
        arm: mean_flops(config, stage_architecture(config)).total * config.total_tokens
        for arm in TUNED
        for config in [configs[f"{arm}_1e-2"]]
    }
    for arm in ("looped", "four_layers", "same_text", "more_text", "two_layers_more"):
        assert flops[arm] == pytest.approx(TOTAL_FLOPS, rel=1e-3), arm
    for arm in TUNED:
        rates = {configs[f"{arm}_{name}"].learning_rate.largest for name in TUNED_RATES}
        assert rates == set(TUNED_RATES.values())
        loader = configs[f"{arm}_1e-2"].dataloader
        assert loader.unique_tokens == (TOTAL_TOKENS if arm == "same_text" else None)
