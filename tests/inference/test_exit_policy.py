"""The rules by themselves, on whole windows, and how they are written."""

import itertools
import math
import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.inference.reference import q_exit_steps
from titan_loop.errors import UserError
from titan_loop.inference.exit_decider import ExitDecider
from titan_loop.inference.exit_policy import (
    Confidence,
    Evidence,
    FixedPoint,
    HiddenDifference,
    KLAndEntropy,
    Margin,
    QExit,
    StaticStep,
    parse_exit_policy,
    require_exit_policy,
)


def survivals(logits: list[float]) -> list[float]:
    """S_m, the probability of having gone on after step m: multiplied out in float64."""
    going_on = [1 / (1 + math.exp(logit)) for logit in logits]
    return list(itertools.accumulate(going_on, operator.mul))


@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=8), st.floats(0, 1))
@example([30.0] * 4, 1.0)
def test_q_exit_is_the_literal_minimum(logits: list[float], threshold: float):
    *before_last, _ = survivals(logits)
    assume(all(abs(1 - s - threshold) > 1e-6 for s in before_last) or threshold == 1)  # fp32 sums
    reached = [m for m, s in enumerate(before_last, start=1) if s <= 1 - threshold]
    want = min([*reached, len(logits)])
    assert q_exit_steps(torch.tensor(logits).view(-1, 1, 1), threshold).item() == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_threshold_of_one_is_full_depth_however_certain_the_gate(dtype: torch.dtype):
    certain = torch.full((4, 1, 1), 30.0, dtype=dtype)  # CDF(1) = 1 - 1e-13: 1 in fp32
    assert q_exit_steps(certain, 1.0).item() == 4
    assert q_exit_steps(certain, 1 - 1e-14).item() == 2  # between 1 - S_1 and 1 - S_2 = 1 - 1e-26


def test_the_decider_forgets_a_token_when_the_next_one_starts():
    """Row 0 is at its token's second step while row 1 begins a new one."""
    decider = ExitDecider(QExit(0.7), 9, gate=lambda h: h[..., 0], readout=lambda h: h)
    half = torch.zeros((2, 1, 1))
    first = decider.decide(torch.tensor([[1], [1]]), half, half)
    second = decider.decide(torch.tensor([[2], [1]]), half, half)
    assert first.tolist() == [[False], [False]]
    assert second.tolist() == [[True], [False]]  # CDF .75 and .5
    decider.select([1])
    assert decider.decide(torch.tensor([[2]]), half[1:], half[1:]).tolist() == [[True]]


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("full", StaticStep()),
        ("static:2", StaticStep(2)),
        ("hidden:0.5", HiddenDifference(0.5)),
        ("relative:0.5", FixedPoint(0.5)),
        ("margin:0.1", Margin(0.1)),
        ("confidence:0.9", Confidence(0.9)),
        ("q:0.9", QExit(0.9)),
        ("kl:0.01,3", KLAndEntropy(0.01, 3.0)),
    ],
)
def test_policies_are_written_as_text(text, policy):
    assert parse_exit_policy(text) == policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Q:0.9", "exit=Q:0.9 is not an exit policy"),
        ("statik:2", "nearest: static"),
        ("q:1.5", "exit=q:1.5 must be between 0 and 1"),
        ("q:nan", "must be between 0 and 1"),
        ("q", "q takes 1 number"),
        ("kl:0.1", "kl takes 2 number"),
        ("kl:-1,2", "two bounds of at least 0 nats"),
        ("static:0", "exit=static:0 must name a step of at least 1"),
        ("static:1.5", "static takes 1 number"),
        ("hidden:-1", "must be a distance of at least 0"),
        ("margin:-1", "exit=margin:-1.0 must be a distance of at least 0"),
        ("confidence:1.1", "must be between 0 and 1"),
        ("full:3", "full takes 0 number"),
    ],
)
def test_mistakes_in_a_policy_are_one_line(text, message):
    with pytest.raises(UserError, match=message) as raised:
        parse_exit_policy(text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("policy", "fires"),
    [
        (HiddenDifference(0.3), [False, False]),  # the states differ by 3/8
        (HiddenDifference(0.375), [False, False]),
        (HiddenDifference(0.376), [False, True]),
        (FixedPoint(0.25), [False, False]),  # 3/8 of a state of length 3/2
        (FixedPoint(0.26), [False, True]),
        (Margin(0.99), [False, False]),  # the lead was log 1 and is log 2
        (Margin(1.01), [False, True]),
        (Confidence(0.49), [True, True]),
        (Confidence(0.51), [False, False]),
        (KLAndEntropy(math.inf, math.inf), [False, True]),
        # KL is 0.5·log(0.5/0.4) + 0.25·log(0.25/0.4) + 0.25·log(0.25/0.2) = 0.0499
        (KLAndEntropy(0.049, math.inf), [False, False]),
        (KLAndEntropy(0.051, math.inf), [False, True]),
        # The entropy of 1/2, 1/4, 1/4 is 1.5·log 2 = 1.0397
        (KLAndEntropy(0.051, 1.03), [False, False]),
        (KLAndEntropy(0.051, 1.04), [False, True]),
        (StaticStep(2), [False, True]),
        (StaticStep(1), [True, True]),
        (StaticStep(), [False, False]),
    ],
    ids=str,
)
def test_a_token_at_steps_1_and_2(policy, fires):
    now, before = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.4, 0.4, 0.2])
    evidence = Evidence(
        step_BL=torch.tensor([[1, 2]]),
        hidden_BLD=torch.tensor([1.5, 0.0]).expand(1, 2, 2),
        before_BLD=torch.tensor([1.125, 0.0]).expand(1, 2, 2),
        log_prob_BLV=now.log().expand(1, 2, 3),
        log_prob_before_BLV=before.log().expand(1, 2, 3),
    )
    assert policy.fires(evidence).tolist() == [fires]


def test_the_deepest_step_is_r_or_the_step_that_was_asked_for():
    assert [policy.deepest_step(4) for policy in (StaticStep(), StaticStep(4), QExit(0))] == [4] * 3
    assert StaticStep(1).deepest_step(4) == 1
    with pytest.raises(UserError, match="exit=static:5 is beyond recurrent_steps=4; raise R"):
        StaticStep(5).deepest_step(4)


def test_a_model_without_a_gate_or_a_family_without_a_policy():
    model: Any = SimpleNamespace(config=SimpleNamespace(family="ouro"), exit_gate=None)
    require_exit_policy(model, Margin(0.1))
    with pytest.raises(UserError, match="exit=q needs an exit gate, which this model does not ha"):
        require_exit_policy(model, QExit(0.5))
    model.exit_gate = object()
    require_exit_policy(model, QExit(0.5))
    model.config.family = "adaptive"
    with pytest.raises(UserError, match=r"exit=kl is an exit policy that model\.family=adaptive"):
        require_exit_policy(model, KLAndEntropy())
