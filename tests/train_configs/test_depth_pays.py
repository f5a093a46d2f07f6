"""The arms differ in what their names say, and in nothing else."""

import dataclasses

from titan_loop.models.family import build_decoder
from train_configs.depth_pays import ARMS, TOTAL_TOKENS, depth_pays


def parameters(name: str) -> int:
    options = depth_pays().stage(name).config.model
    model = build_decoder(dataclasses.replace(options, vocab_size=1024), max_seq_len=256)
    gate = 0 if model.exit_gate is None else sum(p.numel() for p in model.exit_gate.parameters())
    return sum(p.numel() for p in model.parameters()) - gate


def test_arms_of_one_comparison_have_the_same_parameters():
    counted = {name: parameters(name) for name in ARMS if name != "dense"}
    injected = {name for name in counted if ARMS[name].get("injection") == "diagonal"}
    assert {counted[name] - 64 * (name in injected) for name in counted} == {291_648}
    assert parameters("dense") > 2 * 291_648


def test_growth_ends_at_the_depth_of_the_fixed_arms():
    recipe = depth_pays()
    grown = recipe.stage("grown").config.recurrence.steps
    assert [grown(part * TOTAL_TOKENS // 4) for part in range(4)] == [1, 2, 4, 4]
    assert recipe.stage("last_step").config.recurrence.steps(0) == 4
    assert recipe.stage("not_looped").config.recurrence.steps(TOTAL_TOKENS) == 1
