"""Runs of a reward stage: a killed one resumes exactly, ranks agree, reward grows."""

import json
from pathlib import Path

import pytest

from tests.support.tiny import act_as_launched, train_run
from titan_loop.data.tasks.mano import Mano
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.rl.reward_loss import RewardLoss
from titan_loop.rl.rollouts import RolloutLoader
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

pytestmark = pytest.mark.usefixtures("alone")

WINDOW, WINDOWS = 16, 16


def reward_config(folder: Path, steps: int = 4, **data) -> LoopTrainer.Config:
    """Return a run from random weights on sums mod 3, whose answer is one token of three."""
    config = LoopTrainer.Config(
        dump_folder=str(folder),
        total_tokens=steps * WINDOW * WINDOWS,
        model=OuroOptions(size="debugmodel", exit_gate=True),
        dataloader=RolloutLoader.Config(
            **{"task": Mano(3, 2), "group": 4, "log_rollouts": True, **data}
        ),
        learning_rate=Schedule.constant(3e-3),
        recurrence=RecurrenceConfig(steps=Schedule.constant(3)),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(WINDOW * WINDOWS)),
        loss=RewardLoss.Config(exit_action=True),
    )
    config.held_out.interval = 0
    config.training.seq_len = WINDOW
    config.training.local_batch_size = 4
    config.checkpoint.interval = 2
    config.metrics.log_freq = 1
    return config


def records(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]


def numbers(folder: Path) -> list[dict]:
    kept = ("step", "loss", "grad_norm", "data_hash")
    return [
        {name: value for name, value in line.items() if name in kept or name.startswith("rl/")}
        for line in records(folder)
    ]


def test_a_stopped_run_writes_the_same_answers_again(tmp_path):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train_run(reward_config(whole))
    config = reward_config(parted)
    config.training.steps = 2
    train_run(config)
    train_run(reward_config(parted))
    assert numbers(parted) == numbers(whole)
    answers = [(each / "rollouts.jsonl").read_text() for each in (whole, parted)]
    assert answers[0] == answers[1]
    assert all(line["rl/gap_nats"] < 1e-5 for line in records(whole))


def train_on_ranks(folder: Path, world_size: int) -> None:
    act_as_launched(world_size)
    train_run(reward_config(folder))


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_draw_the_same_prompts_and_make_the_same_update(tmp_path, gloo_pool, world_size):
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    train_run(reward_config(alone))
    gloo_pool(world_size).run(train_on_ranks, spread, world_size)
    for one, many in zip(numbers(alone), numbers(spread), strict=True):
        assert one.pop("data_hash") == many.pop("data_hash")
        assert many == pytest.approx(one, rel=2e-4, abs=1e-6)  # sums of fp32 in another order


def test_reward_grows_from_random_weights(tmp_path):
    train_run(reward_config(tmp_path, steps=60))
    right = [line["rl/score"] for line in records(tmp_path)]
    # A guess among 128 tokens is right in 1 of 128; the most frequent of three values in a half.
    assert right[0] < 0.25
    assert sum(right[-10:]) / 10 > 0.35
