"""Distributions and draws against their definitions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_loop.errors import UserError
from titan_loop.inference.sampling import Sampling, draw, probabilities


def by_definition(logits: list[float], temperature: float, top_k: int | None, top_p: float):
    """Sort, cut, renormalise: plain Python."""
    order = sorted(range(len(logits)), key=lambda v: -logits[v])[:top_k]
    weight = {v: math.exp((logits[v] - max(logits)) / temperature) for v in order}
    total = sum(weight.values())
    kept, reached = {}, 0.0
    for v in order:
        if reached >= top_p:
            break
        kept[v] = weight[v] / total
        reached += kept[v]
    return [kept.get(v, 0.0) / sum(kept.values()) for v in range(len(logits))]


@given(
    st.lists(st.floats(-8, 8), min_size=1, max_size=12, unique_by=lambda x: round(x, 3)),
    st.floats(0.2, 3),
    st.one_of(st.none(), st.integers(1, 15)),
    st.floats(0.05, 1),
)
def test_probabilities_follow_their_definition(logits, temperature, top_k, top_p):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    got = probabilities(torch.tensor(logits, dtype=torch.float64), sampling)
    want = by_definition(logits, temperature, top_k, top_p)
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), atol=1e-12, rtol=0)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=8), st.floats(0, 1))
def test_a_draw_is_the_inverse_of_the_cumulated_weight(weights, uniform):
    if sum(weights) == 0 or uniform == 1.0:
        return
    token = int(draw(torch.tensor(weights), torch.tensor(uniform, dtype=torch.float64)))
    assert weights[token] > 0
    before, total = sum(weights[:token]), sum(weights)
    assert before <= uniform * total + 1e-12
    assert uniform * total < before + weights[token] + 1e-12


def test_the_largest_random_number_never_draws_a_token_of_weight_zero():
    weight = torch.tensor([[0.1, 0.2, 0.7, 0.0, 0.0]])
    largest = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert draw(weight, largest).tolist() == [2]


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 1e-320])
def test_a_temperature_near_0_is_greedy(temperature):
    weight = probabilities(torch.tensor([[1.0, 30.0, 20.0]]), Sampling(temperature=temperature))
    assert weight.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be 0"),
        ({"temperature": math.nan}, "temperature=nan must be 0"),
        ({"temperature": math.inf}, "temperature=inf must be 0"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.5}, "top_p=1.5 must be above 0 and at most 1"),
    ],
)
def test_values_out_of_range_are_one_line(options, message):
    with pytest.raises(UserError, match=message):
        Sampling(**options)
