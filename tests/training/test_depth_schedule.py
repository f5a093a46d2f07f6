"""Recurrent steps: rounding, clipping, and draws that every rank repeats."""

import math

import numpy as np
import pytest

from titan_loop.training.depth_schedule import (
    RecurrenceConfig,
    depths_over,
    fewest_recurrent_steps,
    most_recurrent_steps,
    recurrent_steps_at,
)
from titan_loop.training.schedule import Schedule


def test_scheduled_recurrence_rounds_and_clips():
    config = RecurrenceConfig(steps=Schedule.parse("0:1 linear 10:5"), max_steps=4)
    at = [recurrent_steps_at(config, tokens=t, step=0, seed=0) for t in (0, 3, 5, 10)]
    assert at == [1, 2, 3, 4]


def test_poisson_recurrence_is_a_function_of_seed_and_step():
    config = RecurrenceConfig(steps=Schedule.constant(6), poisson=True, max_steps=12, min_steps=2)

    def draws(seed: int) -> list[int]:
        return [recurrent_steps_at(config, tokens=0, step=s, seed=seed) for s in range(2000)]

    first = draws(0)
    assert first == draws(0)
    assert first != draws(1)
    assert min(first) == 2
    assert max(first) == 12
    pmf = [math.exp(-6) * 6**k / math.factorial(k) for k in range(40)]
    mean = sum(p * min(max(k, 2), 12) for k, p in enumerate(pmf))
    # Standard error of the mean is about 2.4 / √2000 = 0.054; five of them, and the seed is fixed.
    assert abs(sum(first) / len(first) - mean) < 0.27
    config.max_steps = None
    assert most_recurrent_steps(config) == math.ceil(6 + 4 * math.sqrt(6))


def test_a_run_is_sampled_at_the_middles_of_equal_parts():
    config = RecurrenceConfig(steps=Schedule.steps([(0, 1), (25, 2)]))
    assert depths_over(config, 100) == {(1, None): 1024, (2, None): 3072}


def test_r_from_data_is_the_deepest_examples_within_limits():
    config = RecurrenceConfig(from_data=True, min_steps=2, max_steps=5)
    given = [
        recurrent_steps_at(config, tokens=0, step=1, seed=0, deepest=deepest)
        for deepest in (1, 3, 9, None)
    ]
    assert given == [2, 3, 5, 4]  # without data, the schedule's constant 4
    assert (fewest_recurrent_steps(config), most_recurrent_steps(config)) == (2, 5)


@pytest.mark.parametrize(
    ("mean", "sigma", "reached"),
    [
        (3, 0.0, 2 - 4 * math.exp(-3)),  # R of 0 runs one step
        (1, 0.5, 1.0),  # the rate is 0
        (3, 0.5, None),
    ],
)
def test_the_reach_of_a_drawn_r_is_a_mean(mean: int, sigma: float, reached: float | None):
    config = RecurrenceConfig(
        steps=Schedule.constant(mean), poisson=True, lognormal_sigma=sigma, backward_steps=2
    )
    if reached is None:  # E[min(R, 2)] = 2 − P(R = 1), by the rectangle rule over τ
        tau = np.linspace(-6, 6, 4001) * sigma + math.log(mean - 1) - sigma**2 / 2
        density = np.exp(-(np.linspace(-6, 6, 4001) ** 2) / 2)
        reached = 2 - float(density @ np.exp(-np.exp(tau)) / density.sum())
    ((steps, backward),) = depths_over(config, 100)
    assert steps == mean
    assert backward == pytest.approx(reached, rel=1e-6)
    config.backward_steps = None
    assert depths_over(config, 100) == {(mean, None): 4096}


@pytest.mark.parametrize("mean", [1, 2, 4, 16])
def test_a_lognormal_rate_keeps_the_mean_and_widens_the_draw(mean: int):
    config = RecurrenceConfig(
        steps=Schedule.constant(mean), poisson=True, lognormal_sigma=0.5, max_steps=None
    )
    draws = [recurrent_steps_at(config, tokens=0, step=s, seed=3) for s in range(20_000)]
    variance = (mean - 1) + (mean - 1) ** 2 * math.expm1(0.25)
    # 20,000 draws: six standard errors, false failures below 1e-8
    assert abs(np.mean(draws) - mean) < 6 * math.sqrt(variance / 20_000) + 1e-9
    assert np.var(draws) == pytest.approx(variance, rel=0.15)
    assert min(draws) == 1 == fewest_recurrent_steps(config)
    assert np.mean(np.array(draws) > most_recurrent_steps(config)) < 1e-3
