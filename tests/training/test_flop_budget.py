"""A budget in FLOPs: the tokens it pays for, at schedules of the same shape."""

import math
import re
from dataclasses import replace

import pytest

from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.mano import Mano
from titan_loop.errors import UserError
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.chosen_model import stage_architecture
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.flop_budget import mean_flops, within_budget
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

TOKENS = 64_000


def growing(**options) -> LoopTrainer.Config:
    """A quarter of the tokens at R = 1, another at 2, half at 4."""
    growth = Schedule.steps([(0, 1), (TOKENS // 4, 2), (TOKENS // 2, 4)])
    config = LoopTrainer.Config(
        total_tokens=TOKENS,
        model=OuroOptions(prelude_layers=1, n_layers=3, exit_gate=False),
        recurrence=RecurrenceConfig(steps=growth),
        learning_rate=Schedule.warmup_cosine(
            1e-3, warmup_tokens=6_400, total_tokens=TOKENS, final=1e-4
        ),
        entropy_weight=Schedule.parse("0:0.1 linear 64K:0.05"),
        dataloader=TaskLoader.Config(task=Mano(5, 3)),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(512)),
        **options,
    )
    config.training.seq_len = 64
    return config


def test_the_mean_is_that_of_the_depths_of_the_run():
    config = growing()
    model = stage_architecture(config)
    at = {r: model.training_flops(64, r).total for r in (1, 2, 4)}
    assert mean_flops(config, model).total == pytest.approx((at[1] + at[2] + 2 * at[4]) / 4)
    # A prelude that truncation does not reach is forward only: no mean of R tells for how long.
    config.recurrence.backward_steps = 2
    cut = model.training_flops(64, 4, backward_steps=2).total
    assert mean_flops(config, model).total == pytest.approx((at[1] + at[2] + 2 * cut) / 4)


def test_every_schedule_keeps_its_shape():
    config = growing()
    budget = 3 * TOKENS * mean_flops(config, stage_architecture(config)).total
    fitted = within_budget(replace(config, total_flops=budget))
    assert fitted.total_tokens == pytest.approx(3 * TOKENS, abs=1)
    for schedule, stretched in (
        (config.recurrence.steps, fitted.recurrence.steps),
        (config.learning_rate, fitted.learning_rate),
        (config.entropy_weight, fitted.entropy_weight),
    ):
        for tokens in range(0, TOKENS, 1_000):
            assert stretched(3 * tokens) == pytest.approx(schedule(tokens), rel=1e-9)
    assert config.total_tokens == TOKENS  # untouched
    assert within_budget(fitted) is fitted  # so a run's own config trains it once more
    coarse = RecurrenceConfig(steps=Schedule.parse("0:6 cosine 923:2 cosine 1536:6"))
    coarse = replace(config, total_tokens=1_536, recurrence=coarse, total_flops=1e14)
    fitted = within_budget(coarse)
    assert fitted.total_tokens > 1e6
    assert within_budget(fitted) is fitted


@pytest.mark.parametrize(
    ("budget", "problem"),
    [
        (0.0, "must be above 0 and finite"),
        (-1e12, "must be above 0 and finite"),
        (math.inf, "must be above 0 and finite"),
        (math.nan, "must be above 0 and finite"),
        (1.0, "pays .* give more"),
        (2e8, "pays for .* tokens, too few for a schedule over 64,000: schedule knot .* not incr"),
    ],
)
def test_a_budget_that_cannot_be_spent_is_refused(budget, problem):
    config = growing(total_flops=budget)
    config.learning_rate = Schedule.parse("0:0 linear 2:3e-3 cosine 3:1e-4")
    with pytest.raises(UserError, match=rf"total_flops={re.escape(f'{budget:g}')} {problem}"):
        within_budget(config)
