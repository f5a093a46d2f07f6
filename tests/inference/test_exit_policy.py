"""The rules by themselves, on whole windows, and how they are written."""

import itertools
import math
import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.inference.reference import make_model, q_exit_steps
from titan_loop.errors import UserError
from titan_loop.inference.exit_decider import ExitDecider, exit_steps
from titan_loop.inference.exit_policy import (
    Confidence,
    Contrast,
    Evidence,
    ExitPolicy,
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


def test_q_exit_uses_at_least_and_the_last_step_takes_the_rest():
    half = torch.zeros((4, 1, 1), dtype=torch.float64)  # λ = 1/2: CDF .5 .75 .875 1
    expected = {0.0: 1, 0.5: 1, 0.51: 2, 0.75: 2, 0.875: 3, 0.9: 4, 1.0: 4}
    assert {q: q_exit_steps(half, q).item() for q in expected} == expected


@torch.no_grad()
def test_policies_on_whole_windows_agree_with_their_formulas():
    model = make_model().double()
    tokens = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(0))
    states = model(tokens, recurrent_steps=5).hidden_RBLD
    log_prob = [model.readout(h).log_softmax(-1) for h in states]

    def first(fires) -> torch.Tensor:
        left = torch.full((2, 16), 5)
        for r in (4, 3, 2):
            left = torch.where(fires(r), r, left)
        return left

    def distance(r):
        return (states[r - 1] - states[r - 2]).square().sum(-1).sqrt()

    def divergence(r):
        now, before = log_prob[r - 1], log_prob[r - 2]
        return F.kl_div(before, now, reduction="none", log_target=True).sum(-1)

    def entropy(r):
        return torch.distributions.Categorical(logits=log_prob[r - 1]).entropy()

    epsilon = float(distance(3).median())
    kl, nats = float(divergence(3).median()), float(entropy(3).median())
    cases = {
        HiddenDifference(epsilon): first(lambda r: distance(r) < epsilon),
        KLAndEntropy(kl, nats): first(lambda r: (divergence(r) < kl) & (entropy(r) < nats)),
        StaticStep(3): torch.full((2, 16), 3),
        StaticStep(): torch.full((2, 16), 5),
    }
    for policy, expected in cases.items():
        got = exit_steps(policy, states, gate=model.gate, readout=model.readout)
        assert torch.equal(got, expected)
        assert len(got.unique()) > 1 or isinstance(policy, StaticStep)


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


def test_a_bf16_state_is_compared_in_fp32():
    before = torch.full((1, 1, 4096), 1.0, dtype=torch.bfloat16)
    now = before.clone()
    now[..., :100] += 0.0078125
    policy = HiddenDifference(0.0782)
    step = torch.tensor([[2]])
    decider = ExitDecider(policy, 4, gate=lambda h: h, readout=lambda h: h)
    assert decider.decide(step, now, before).item()  # 10 · 0.0078125 = 0.078125


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("full", StaticStep()),
        ("static:1", StaticStep(1)),
        ("static:2", StaticStep(2)),
        ("hidden:0.5", HiddenDifference(0.5)),
        ("fixed_point:0.5", FixedPoint(0.5)),
        ("relative:0.5", FixedPoint(0.5)),
        ("margin:0.1", Margin(0.1)),
        ("contrast:1,0.5,0.1", Contrast(1, 0.5, 0.1)),
        ("confidence:0.9", Confidence(0.9)),
        ("q:0.9", QExit(0.9)),
        ("kl:0.01,3", KLAndEntropy(0.01, 3.0)),
        ("contrast:2/0.5/0.1", Contrast(2, 0.5, 0.1)),
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
        ("q:-0.1", "must be between 0 and 1"),
        ("q:nan", "must be between 0 and 1"),
        ("q", "q takes 1 number"),
        ("q:x", "q takes 1 number"),
        ("kl:0.1", "kl takes 2 number"),
        ("kl:-1,2", "two bounds of at least 0 nats"),
        ("static:0", "exit=static:0 must name a step of at least 1"),
        ("static:1.5", "static takes 1 number"),
        ("hidden:-1", "must be a distance of at least 0"),
        ("relative:-1", "exit=fixed_point:-1.0 must be a distance of at least 0"),
        ("margin:-1", "exit=margin:-1.0 must be a distance of at least 0"),
        ("margin:nan", "must be a distance of at least 0"),
        ("contrast:1", "contrast takes 3 number"),
        ("contrast:0,0.5,0.1", "contrast:0,0.5,0.1 must name an early step, a whole number"),
        ("contrast:1.5,0.5,0.1", "must name an early step, a whole number of at least 1"),
        ("contrast:1,-1,0.1", "must have a strength of at least 0"),
        ("contrast:1,inf,0.1", "must have a strength of at least 0"),
        ("contrast:1,0.5,1.5", "must have a share from 0 to 1"),
        ("confidence:1.1", "must be between 0 and 1"),
        ("full:3", "full takes 0 number"),
    ],
)
def test_mistakes_in_a_policy_are_one_line(text, message):
    with pytest.raises(UserError, match=message) as raised:
        parse_exit_policy(text)
    assert "\n" not in str(raised.value)


def test_infinite_bounds_are_allowed():
    assert parse_exit_policy("hidden:inf") == HiddenDifference(math.inf)


@pytest.mark.parametrize(
    "text", ["q:0", "q:1", "confidence:0", "confidence:1", "hidden:0", "kl:0,0", "contrast:1,0,0"]
)
def test_values_at_the_ends_of_their_ranges_are_policies(text):
    assert isinstance(parse_exit_policy(text), ExitPolicy)
    assert parse_exit_policy("contrast:1,0.5,1") == Contrast(1, 0.5, 1)


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
        (Contrast(1), [False, False]),
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


@pytest.mark.parametrize(
    ("policy", "reads"),
    [
        (StaticStep(1), (False, False, False)),
        (HiddenDifference(0.1), (False, False, True)),
        (FixedPoint(0.1), (False, False, True)),
        (Margin(0.1), (False, True, True)),
        (Confidence(0.1), (False, True, True)),
        (QExit(0.1), (True, False, True)),
        (KLAndEntropy(), (False, True, True)),
        (Contrast(2), (False, False, False)),
    ],
    ids=str,
)
def test_a_policy_reads_what_it_needs(policy, reads):
    assert (policy.reads_gate, policy.reads_logits, policy.reads_states) == reads
    assert policy.early_step == (2 if isinstance(policy, Contrast) else None)


def test_the_deepest_step_is_r_or_the_step_that_was_asked_for():
    assert [policy.deepest_step(4) for policy in (StaticStep(), StaticStep(4), QExit(0))] == [4] * 3
    assert StaticStep(1).deepest_step(4) == 1
    assert Contrast(3).deepest_step(4) == 4
    with pytest.raises(UserError, match="exit=static:5 is beyond recurrent_steps=4; raise R"):
        StaticStep(5).deepest_step(4)
    with pytest.raises(UserError, match="exit=contrast:4 needs a later step to contrast with"):
        Contrast(4).deepest_step(4)


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
