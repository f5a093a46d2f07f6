"""Drawn and learned depths against the published numbers and against plain arithmetic."""

import math

import numpy as np
import pytest
import torch

from titan_loop.errors import UserError
from titan_loop.families.xllm.depth import DrawnDepth, capped_depths
from titan_loop.families.xllm.prior import DepthPrior, PriorSettings

# PLN-5 of the released code: mean 5, sigma 0.5, cap 64, in the runs of the paper.
PLN5 = """
0.05768747546482591 0.1271367387177668 0.1634086392890813 0.1619074983340164 0.13796282734225382
0.10698272319110169 0.07804764707860895 0.05470693907876852 0.037361700976777726
0.025099433949814245 0.016697717702268286 0.011052629620047851 0.007304055652903804
0.004830737772361538 0.003203151771039994 0.002132081017445029 0.0014258721987138567
0.0009586921076838706 0.0006483099746274615 0.0004410716241755722 0.000301944551073642
0.00020800269392146997 0.00014419125207641085 0.00010058218331207551 7.059667258419262e-05
4.9852412062464184e-05 3.5414136427653425e-05 2.5304622107571485e-05 1.8184285152127846e-05
1.3140259666362847e-05 9.546846563012203e-06 6.972695919262932e-06 5.118738343708846e-06
3.7764502416124336e-06 2.7996353510214844e-06 2.085238462098128e-06 1.5602277964955316e-06
1.1725776685897305e-06 8.850369680325107e-07 6.708005361757733e-07 5.104868279453078e-07
3.900165388933937e-07 2.9911563900765575e-07 2.3025345865338855e-07 1.778857064050211e-07
1.3791253597731962e-07 1.0728910765229482e-07 8.3744719506e-08 6.557941898380174e-08
5.151599353655518e-08 4.059163481228815e-08 3.207815872458309e-08 2.5422939995903076e-08
2.020502320279681e-08 1.6102459981160398e-08 1.286800205515741e-08 1.0311018925701726e-08
8.284031836490163e-09 6.672645135115369e-09 5.387960542342231e-09 4.3608027065798596e-09
3.5372756494056925e-09 2.8753142244955275e-09 1.3322268843651841e-08
"""
TABLE = [float(number) for number in PLN5.split()]


def test_the_published_distribution():
    found = capped_depths(5, 0.5, 64)
    assert len(TABLE) == len(found) == 64
    np.testing.assert_allclose(found, TABLE, rtol=1e-9, atol=1e-14)
    assert found @ np.arange(1, 65) == pytest.approx(5, abs=1e-12)


def test_ten_thousand_draws_are_the_published_tables():
    drawn = DrawnDepth(probabilities=capped_depths(5, 0.5, 64))
    upto = np.cumsum(TABLE)
    for index in range(10_000):
        generator = torch.Generator()
        generator.manual_seed(index + 514229)
        uniform = torch.rand((), generator=generator).item()
        assert drawn.draw(index) == int((upto < uniform).sum()) + 1


def reference(settings: PriorSettings, losses: list[tuple[int, float]]) -> torch.Tensor:
    """Return the distribution after steps of (depth, loss), by hand, with plain Adam."""
    theta = np.log(np.asarray(TABLE))
    steps, first, second = np.arange(1, 65), np.zeros(64), np.zeros(64)
    mean_l = mean_c = var_l = var_c = 0.0
    updates = 0
    for number, (depth, loss) in enumerate(losses):
        cost = -math.exp(-loss)
        if number >= settings.burn_in:
            scale = max(math.sqrt(var_l), 1e-12) / max(math.sqrt(var_c), 1e-12)
            p = np.exp(theta - theta.max())
            p /= p.sum()
            gradient = (cost - mean_c) * scale * ((steps == depth) - p)
            mean = p @ steps
            gradient += settings.mean_weight * 2 * (mean - settings.mean) * p * (steps - mean)
            entropy = p @ np.log(p)
            gradient += settings.entropy_weight * p * (np.log(p) - entropy)
            updates += 1
            first = 0.9 * first + 0.1 * gradient
            second = 0.999 * second + 0.001 * gradient**2
            corrected = np.sqrt(second / (1 - 0.999**updates)) + 1e-8
            theta = theta - settings.rate * first / (1 - 0.9**updates) / corrected
        d = settings.average_decay
        if number == 0:
            mean_l, mean_c = loss, cost
        else:
            var_l = d * var_l + d * (1 - d) * (loss - mean_l) ** 2
            var_c = d * var_c + d * (1 - d) * (cost - mean_c) ** 2
            mean_l, mean_c = d * mean_l + (1 - d) * loss, d * mean_c + (1 - d) * cost
    p = np.exp(theta - theta.max())
    return torch.from_numpy(p / p.sum())


def told(prior: DepthPrior, count: int) -> list[tuple[int, float]]:
    """Return made-up steps: deeper is better, with noise."""
    noise = np.random.default_rng(3).normal(0, 0.1, count)
    return [
        (depth, 3 + 1 / depth + noise[index])
        for index in range(count)
        for depth in [prior.draw(1, index)]
    ]


@pytest.mark.parametrize("entropy", [0.0, 0.01])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_the_prior_takes_the_steps_of_its_equations(entropy, penalty):
    settings = PriorSettings(entropy_weight=entropy, mean_weight=penalty, rate=0.02)
    prior = DepthPrior(settings, TABLE)
    losses = told(prior, 200)
    for depth, loss in losses:
        prior.learn(depth, loss)
    torch.testing.assert_close(
        prior.probabilities, reference(settings, losses), atol=1e-12, rtol=1e-9
    )


def test_mistakes_are_one_line():
    with pytest.raises(UserError, match=r"^mean=64 recurrent steps must be above 1 and below"):
        capped_depths(64, 0.5, 64)
    with pytest.raises(UserError, match=r"^sigma=0 must be above 0"):
        capped_depths(5, 0, 64)
    with pytest.raises(UserError, match=r"^a learned distribution of depths must start"):
        DepthPrior(PriorSettings(), [0.5, 0.0, 0.5])
    prior = DepthPrior(PriorSettings(), TABLE)
    with pytest.raises(UserError, match=r"is over 64 recurrent steps, this run's over 2"):
        DepthPrior(PriorSettings(), [0.5, 0.5]).load_state_dict(prior.state_dict())
