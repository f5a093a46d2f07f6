"""Arms differ in objective and readout alone; Stage II starts from its arm."""

from dataclasses import replace

import pytest

from titan_loop.families.ouro.objective import AdaptiveGateLoss
from titan_loop.training.chosen_model import stage_architecture
from train_configs.depth_pays.recipes import BATCH_TOKENS, LATE_FROM, TOTAL_TOKENS, depth_pays
from train_configs.depth_read.readable_steps import ReadableStepsLoss
from train_configs.depth_read.recipes import GATES, TASK_ARMS, TASKS, TEXT, depth_read

RECIPE = depth_read()


def test_text_arms_are_the_last_step_model_of_depth_pays_with_a_gate():
    known = depth_pays().stage("last_step_muon").config
    for name in TEXT:
        config = RECIPE.stage(name).config
        assert isinstance(config.loss, ReadableStepsLoss.Config)
        same = replace(
            config.model,
            exit_gate=False,
            readout_rank=None,
            early_states="trained",
            norm_placement="every_step",
        )
        assert same == known.model
        for field in ("dataloader", "learning_rate", "optimizer", "total_tokens", "recurrence"):
            assert getattr(config, field) == getattr(known, field), field


def test_late_schedules_begin_late_and_are_stretched_with_a_tasks_tokens():
    every_step = RECIPE.stage("rank8_late").config.loss.every_step
    assert [every_step(tokens) for tokens in (0, LATE_FROM - 1, LATE_FROM)] == [0, 0, 0.5]
    for task in TASKS:
        config = RECIPE.stage(f"{task}_rank8_late").config
        begin = LATE_FROM * config.total_tokens // TOTAL_TOKENS
        assert config.total_tokens > TOTAL_TOKENS
        assert [config.loss.every_step(tokens) for tokens in (begin - 1, begin)] == [0, 0.5]


@pytest.mark.parametrize("name", [*TEXT, *(f"{t}_{a}" for t in TASKS for a in TASK_ARMS)])
def test_stage_two_starts_from_its_arm_and_trains_the_gate_alone(name: str):
    before = RECIPE.stage(name)
    for kind, (look_ahead, updates) in GATES.items():
        stage = RECIPE.stage(f"{name}_{kind}")
        assert stage.parent == name
        assert stage.config.trainable == "exit_gate"
        assert isinstance(stage.config.loss, AdaptiveGateLoss.Config)
        assert stage.config.loss.look_ahead is look_ahead
        assert stage.config.total_tokens == updates * BATCH_TOKENS
        assert stage_architecture(stage.config) == stage_architecture(before.config)
        assert stage.config.dataloader.seed != before.config.dataloader.seed
