"""The exit distribution: properties for any logits, a slow float64 reference, printed numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from titan_loop.objectives.exit_distribution import (
    exit_entropy_nats,
    exit_log_pmf,
    exit_pmf,
    geometric_prior,
    kl_to_prior,
    mean_exit_step,
)

FP32_SUM = 1e-6
"""A few roundings of 2^-24 per step, for at most 8 steps of probabilities."""
PRINTED = 5e-4
"""Numbers given to three digits."""

logits = st.lists(
    st.one_of(
        st.floats(-1e4, 1e4, width=32),
        st.floats(-5, 5, width=32),
        st.sampled_from([math.inf, -math.inf, 0.0, 1e4, -1e4]),
    ),
    min_size=1,
    max_size=8,
)
any_logits = settings(max_examples=200)


def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    """One token's gate logits, (R, 1, 1)."""
    return torch.tensor(values, dtype=dtype).view(-1, 1, 1)


def uniform(steps: int) -> Tensor:
    return torch.full((steps,), 1 / steps)


def slow_pmf(values: list[float]) -> list[float]:
    """The definition, multiplied out, with λ and 1 − λ each computed without cancellation."""

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))

    survival, pmf = 1.0, []
    for gate in values[:-1]:
        pmf.append(sigmoid(gate) * survival)
        survival *= sigmoid(-gate)
    return [*pmf, survival]


@any_logits
@given(logits)
def test_pmf_is_a_distribution(values: list[float]):
    pmf = exit_pmf(column(values))
    assert pmf.dtype == torch.float32
    assert (pmf >= 0).all()
    assert pmf.sum().item() == pytest.approx(1.0, abs=FP32_SUM)


@any_logits
@given(logits)
def test_entropy_and_gradients_are_finite(values: list[float]):
    logit = column(values).requires_grad_()
    steps = len(values)
    entropy = exit_entropy_nats(logit)
    assert -FP32_SUM <= entropy.item() <= math.log(steps) + FP32_SUM
    kl = kl_to_prior(logit, uniform(steps))
    mean_step = mean_exit_step(logit)
    assert 1 - FP32_SUM * steps <= mean_step.item() <= steps + FP32_SUM * steps
    (entropy + kl + mean_step).sum().backward()
    assert logit.grad is not None
    assert logit.grad.isfinite().all()
    assert logit.grad[-1].item() == 0.0, "the last gate is unused"


@any_logits
@given(st.lists(st.floats(-300, 300), min_size=1, max_size=8))
def test_equals_the_slow_float64_reference(values: list[float]):
    want = slow_pmf(values)
    logit = column(values, torch.float64)
    assert exit_pmf(logit).flatten().tolist() == pytest.approx(want, rel=1e-9, abs=1e-300)
    entropy = -sum(p * math.log(p) for p in want if p > 0)
    assert exit_entropy_nats(logit).item() == pytest.approx(entropy, rel=1e-9, abs=1e-12)
    mean = sum(r * p for r, p in enumerate(want, start=1))
    assert mean_exit_step(logit).item() == pytest.approx(mean, rel=1e-9)


def test_gradcheck():
    generator = torch.Generator().manual_seed(0)
    logit = torch.randn(4, 2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    prior = geometric_prior(4, 0.3).double()
    for function in (
        exit_log_pmf,
        exit_pmf,
        exit_entropy_nats,
        mean_exit_step,
        lambda x: kl_to_prior(x, prior),
    ):
        assert torch.autograd.gradcheck(function, (logit,))


def test_geometric_prior_is_renormalised():
    prior = geometric_prior(4, 0.1)
    assert prior.tolist() == pytest.approx([0.291, 0.262, 0.236, 0.212], abs=PRINTED)
    assert prior.sum().item() == pytest.approx(1.0, abs=FP32_SUM)
    ratios = prior[1:] / prior[:-1]
    torch.testing.assert_close(ratios, torch.full((3,), 0.9))
    # η → 0 is the uniform prior.
    torch.testing.assert_close(geometric_prior(5, 1e-9), uniform(5))


@any_logits
@given(logits, st.floats(0.05, 0.95))
def test_kl_is_never_negative_and_complements_the_entropy(values: list[float], eta: float):
    logit, steps = column(values), len(values)
    assert kl_to_prior(logit, geometric_prior(steps, eta)).item() >= -FP32_SUM * steps
    from_uniform = kl_to_prior(logit, uniform(steps)).item()
    complement = math.log(steps) - exit_entropy_nats(logit).item()
    assert from_uniform == pytest.approx(complement, abs=FP32_SUM * steps)


def test_published_mean_distribution_has_the_published_mean_exit():
    # Ouro, mean pmf on MMLU: {0.0004, 0.0855, 0.3793, 0.5348}, mean exit 3.45 (its entropy: 0.916).
    pmf = torch.tensor([0.0004, 0.0855, 0.3793, 0.5348], dtype=torch.float64)
    survival = 1 - torch.cat([torch.zeros(1), pmf.cumsum(0)[:-1]])
    logit = torch.cat([torch.logit((pmf / survival)[:-1]), torch.zeros(1)]).view(4, 1, 1)
    assert mean_exit_step(logit).item() == pytest.approx(3.45, abs=5e-3)
    assert exit_entropy_nats(logit).item() == pytest.approx(0.916, abs=PRINTED)
