"""Objectives of rewards against the papers' equations in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from titan_loop.rl.objectives import (
    clipped_loss,
    group_advantages,
    has_spread,
    kl_estimate,
    overlong_penalty,
    token_weights,
)

REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [3.0, -1.0, 0.0, 0.0]]


def test_advantages_are_of_the_group_and_0_without_spread():
    reward_PG = torch.tensor(REWARDS, dtype=torch.float64)
    wanted = []
    for group in REWARDS:
        mean = sum(group) / 4
        spread = math.sqrt(sum((each - mean) ** 2 for each in group) / 3)
        wanted.append([(each - mean) / spread if spread else 0.0 for each in group])
    # With answers that nobody judged beside them, which count in no mean.
    for unjudged in (0, 2):
        padded_PG = F.pad(reward_PG, (0, unjudged), value=9.0)
        judged_PG = F.pad(torch.ones_like(reward_PG, dtype=torch.bool), (0, unjudged))
        found_PG = group_advantages(padded_PG, judged_PG)
        torch.testing.assert_close(found_PG[:, :4], torch.tensor(wanted).double())
        assert not found_PG[:, 4:].any()
        assert has_spread(padded_PG, judged_PG).tolist() == [True, False, True]
    assert not group_advantages(reward_PG, torch.zeros_like(reward_PG, dtype=torch.bool)).any()
    rounded_PG = torch.full((1, 6), 1 - 1 / 3, dtype=torch.float64)  # not their mean
    assert not group_advantages(rounded_PG, torch.ones(1, 6, dtype=torch.bool)).any()


def test_weights_normalise_by_answer_group_or_batch():
    length_PG = torch.tensor([[2, 6], [0, 4]])
    rows = {
        "sequence": [[1 / 8, 1 / 24], [0, 1 / 16]],
        "group": [[1 / 16, 1 / 16], [0, 1 / 8]],
        "batch": [[1 / 12, 1 / 12], [0, 1 / 12]],
    }
    for normaliser, wanted in rows.items():
        found = token_weights(length_PG, normaliser)  # type: ignore[arg-type]
        torch.testing.assert_close(found, torch.tensor(wanted).double(), msg=normaliser)


@pytest.mark.parametrize(
    ("ratio", "advantage", "wanted"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 2.0, -2.56),  # above 1 + 0.28: no gain from more
        (1.5, -2.0, 3.0),  # a bad token that became likelier is not clipped
        (0.5, 2.0, -1.0),
        (0.5, -2.0, 1.6),  # below 1 − 0.2
    ],
)
def test_the_ratio_is_clipped_where_it_would_gain(ratio, advantage, wanted):
    old = torch.tensor([-1.3], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    loss = clipped_loss(new, old, torch.tensor([advantage]), clip_low=0.2, clip_high=0.28)
    assert loss.item() == pytest.approx(wanted, rel=1e-12)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    is_clipped = (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
    assert gradient.item() == pytest.approx(0.0 if is_clipped else -ratio * advantage)


def test_the_estimate_of_kl_is_unbiased():
    policy = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    parent = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)
    expected = (policy * kl_estimate(policy.log(), parent.log())).sum()
    torch.testing.assert_close(expected, (policy * (policy / parent).log()).sum())


def test_the_penalty_grows_within_the_buffer():
    length = torch.tensor([10, 16, 18, 20, 25])
    wanted = torch.tensor([0.0, 0.0, -0.5, -1.0, -1.0]).double()
    torch.testing.assert_close(overlong_penalty(length, most=20, buffer=4), wanted)
