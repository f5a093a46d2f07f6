"""Runs of a reward stage: a killed one resumes exactly, ranks agree, reward grows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import act_as_launched, train_run
from titan_loop.cli.overrides import apply_overrides
from titan_loop.data.tasks.mano import Mano
from titan_loop.errors import UserError
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.rl.reward_loss import RewardLoss
from titan_loop.rl.rollouts import RolloutLoader
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.callback import Callback
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
    config.training.local_batch_size = 8
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


def test_the_price_and_the_log_have_flags_of_their_own(tmp_path):
    flags = ["--rl.step-price", "0.25", "--rl.no-log-rollouts"]
    data = apply_overrides(reward_config(tmp_path), flags, "train").dataloader
    assert (data.step_price, data.log_rollouts) == (0.25, False)


def whole_run(folders: pytest.TempPathFactory) -> Path:
    """Return a run that was never stopped; trained once, for tests that only read it."""
    folder = folders.getbasetemp() / "whole-reward-run"
    if not folder.exists():
        train_run(reward_config(folder))
    return folder


def test_a_stopped_run_writes_the_same_answers_again(tmp_path, tmp_path_factory):
    whole, parted = whole_run(tmp_path_factory), tmp_path / "parted"
    config = reward_config(parted)
    config.training.steps = 2
    train_run(config)
    train_run(reward_config(parted))
    assert numbers(parted) == numbers(whole)
    answers = [(each / "rollouts.jsonl").read_text() for each in (whole, parted)]
    assert answers[0] == answers[1]
    assert all(line["rl/gap_nats"] < 1e-5 for line in records(whole))


def test_later_updates_of_the_same_answers_are_clipped(tmp_path):
    config = reward_config(tmp_path, steps=4, updates=2)
    config.learning_rate = Schedule.constant(3e-2)
    train_run(config)
    lines = records(tmp_path)
    assert [line["rl/clipped"] > 0 for line in lines] == [False, True] * 2
    assert all(line["rl/gap_nats"] < 1e-5 for line in lines)
    answers = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    assert {json.loads(line)["window"] for line in answers} == {0, 2 * WINDOWS}


def test_a_batch_that_grows_between_two_updates_is_written_whole(tmp_path):
    config = reward_config(tmp_path, steps=3, updates=2)
    sizes = [(0, WINDOW * WINDOWS), (WINDOW * WINDOWS, 2 * WINDOW * WINDOWS)]
    config.batch.global_batch_tokens = Schedule.steps(sizes)
    train_run(config)
    answers = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    assert {json.loads(line)["window"] for line in answers} == {0, WINDOWS}


def test_a_run_that_is_stopped_between_two_lots_of_answers_goes_on_with_the_old_ones(tmp_path):
    whole = tmp_path / "whole"
    train_run(reward_config(whole, updates=3))
    for stopped_after in (1, 3):
        parted = tmp_path / f"after-{stopped_after}"
        config = reward_config(parted, updates=3)
        config.training.steps = stopped_after
        train_run(config)
        train_run(reward_config(parted, updates=3))
        assert numbers(parted) == numbers(whole)
        answers = [(each / "rollouts.jsonl").read_text() for each in (whole, parted)]
        assert answers[0] == answers[1]


def test_answers_from_before_an_accepted_change_are_dropped(tmp_path):
    config = reward_config(tmp_path, steps=2, updates=2)
    config.training.steps = 1
    train_run(config)
    train_run(reward_config(tmp_path, steps=2, updates=2, seed=1, accept_change=True))
    answers = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    assert {json.loads(line)["window"] for line in answers} == {0, WINDOWS}


class Jump(Callback):
    def on_train_start(self, trainer: Any) -> None:
        trainer.dataloader.jump([(WINDOWS, 2 * WINDOWS)])


def test_prompts_that_a_rewind_leaves_out_are_jumped_over(tmp_path):
    train_run(reward_config(tmp_path, steps=2), callbacks=[Jump()])
    answers = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    assert {json.loads(line)["window"] for line in answers} == {0, 2 * WINDOWS}


def test_answers_that_bf16_weights_write_are_a_little_off_the_trained_ones(tmp_path):
    train_run(reward_config(tmp_path, dtype="bfloat16"))
    assert all(1e-5 < line["rl/gap_nats"] < 0.05 for line in records(tmp_path))


def test_a_small_price_moves_groups_without_spread_a_little(tmp_path):
    free, priced, dear = (tmp_path / name for name in ("free", "priced", "dear"))
    train_run(reward_config(free, steps=1))
    train_run(reward_config(priced, steps=1, step_price=1e-4))
    train_run(reward_config(dear, steps=1, step_price=1.0))
    norms = [records(folder)[0]["grad_norm"] for folder in (free, priced, dear)]
    assert records(free)[0]["rl/groups_without_spread"] > 0
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)
    assert norms[2] != pytest.approx(norms[0], rel=1e-1)


def test_a_run_is_held_near_its_parent(tmp_path, tmp_path_factory):
    parent = whole_run(tmp_path_factory)
    free, held = tmp_path / "free", tmp_path / "held"
    for folder, weight in {free: 1e-9, held: 10.0}.items():
        config = reward_config(folder, steps=6, parent=str(parent))
        config.loss = RewardLoss.Config(exit_action=True, kl_weight=weight)
        config.checkpoint.carry.parent = str(parent)
        train_run(config)
    assert records(held)[0]["rl/kl_nats"] == pytest.approx(0, abs=1e-6)
    assert records(free)[-1]["rl/kl_nats"] > 2 * records(held)[-1]["rl/kl_nats"]


@pytest.mark.parametrize(
    ("loss", "data", "words"),
    [
        ({"kl_weight": 0.1}, {}, "loss.kl_weight=0.1 has no parent; set dataloader.parent"),
        (
            {"trajectory": "pmf"},
            {},
            "loss.trajectory=pmf reads all steps; set dataloader.exit=full",
        ),
        (
            {"trajectory": "uniform"},
            {"exit": "full", "updates": 2},
            "has no older log π; set dataloader.updates=1",
        ),
        (
            {"trajectory": "pmf", "exit_action": True},
            {"exit": "full"},
            "loss.exit_action=True has no effect with loss.trajectory=pmf",
        ),
        (
            {"exit_action": True},
            {"exit": "q:0.5"},
            "loss.exit_action=True trains the gate on exits that it did not draw; set",
        ),
        (
            {},
            {"dtype": "bfloat16", "updates": 2},
            "dataloader.dtype=bfloat16 writes with other weights than π_old",
        ),
        ({}, {"group": 3}, "training.local_batch_size=8 must be a multiple of dataloader.group=3"),
        ({}, {"exit": "sample"}, "exit=sample is not an exit policy; nearest: sampled"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path, loss, data, words):
    config = reward_config(tmp_path, **data)
    config.loss = RewardLoss.Config(**loss)
    with pytest.raises(UserError) as refused:
        train_run(config)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"steps": Schedule.steps([(0, 3), (2 * WINDOW * WINDOWS, 2)])}, "steps='0:3 constant"),
        ({"poisson": True}, "poisson=True changes R, and the objective needs one R"),
    ],
)
def test_a_change_of_r_is_refused_before_training(tmp_path, asked, words):
    config = reward_config(tmp_path)
    config.recurrence = replace(config.recurrence, **asked)
    with pytest.raises(UserError) as refused:
        train_run(config)
    assert words in str(refused.value)
    assert not (tmp_path / "checkpoints").exists()


def train_on_two_ranks(folder: Path) -> None:
    act_as_launched(2)
    config = reward_config(folder)
    config.training.local_batch_size = 4  # two micro-batches on each of two ranks
    train_run(config)


def test_ranks_draw_the_same_prompts_and_make_the_same_update(
    tmp_path, tmp_path_factory, gloo_pool
):
    alone, spread = whole_run(tmp_path_factory), tmp_path / "spread"
    gloo_pool(2).run(train_on_two_ranks, spread)
    for one, many in zip(numbers(alone), numbers(spread), strict=True):
        assert one.pop("data_hash") == many.pop("data_hash")
        assert many == pytest.approx(one, rel=2e-4, abs=1e-6)  # sums of fp32 in another order


def test_reward_grows_from_random_weights(tmp_path):
    train_run(reward_config(tmp_path, steps=20))
    right = [line["rl/score"] for line in records(tmp_path)]
    # A guess among 128 tokens is right in 1 of 128; the most frequent of three values in a half.
    assert right[0] < 0.25
    assert sum(right[-10:]) / 10 > 0.35
