"""Comparisons of two steps against their formulas in Python's own floats."""

import math

import pytest
import torch

from titan_loop.inference import measures

EXACT = 1e-12  # float64 against float64
P, Q = [0.5, 0.3, 0.2], [0.2, 0.7, 0.1]


def log_p(values: list[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).log()[None, None]


def test_distances_of_states():
    hidden, before = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[3.0, 1.0]]])
    assert measures.hidden_distance(hidden, before).tolist() == [[3.0]]
    assert measures.relative_distance(hidden, before).item() == pytest.approx(3 / 5)


def test_arithmetic_is_in_fp32_or_wider():
    half, double = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64)
    assert measures.at_least_fp32(half).dtype == torch.float32
    assert measures.at_least_fp32(double).dtype == torch.float64
    assert measures.log_probabilities(half).tolist() == pytest.approx([-math.log(2)] * 2)


def test_divergence_and_entropy():
    divergence = sum(p * math.log(p / q) for p, q in zip(P, Q, strict=True))
    entropy = -sum(p * math.log(p) for p in P)
    assert measures.divergence_nats(log_p(P), log_p(Q)).item() == pytest.approx(divergence, EXACT)
    assert measures.entropy_nats(log_p(P)).item() == pytest.approx(entropy, EXACT)


@pytest.mark.parametrize(
    ("before", "lead"), [(Q, math.log(0.2 / 0.7)), (P, math.log(0.5 / 0.3))], ids=["other", "same"]
)
def test_the_lead_of_the_likeliest_token(before, lead):
    """Token 0 leads token 1 by log(0.5/0.3); before, another token may have led."""
    now = math.log(0.5 / 0.3)
    change = measures.margin_change(log_p(P), log_p(before)).item()
    assert change == pytest.approx(abs(now - lead) / now, EXACT, EXACT)


@pytest.mark.parametrize(("share", "kept"), [(0.0, 3), (0.4, 3), (0.6, 2), (0.61, 1), (1.0, 1)])
@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_plausible_tokens_are_contrasted_and_the_others_stay(share, kept, strength):
    """The likeliest token has 0.5: 0.3 is 0.6 of it, and 0.2 is 0.4."""
    share = share - 1e-9 if share in (0.4, 0.6) else share  # log and exp round
    early = measures.log_probabilities(log_p(Q))
    found = measures.contrasted(log_p(P), early, strength=strength, share=share).exp()[0, 0]
    scores = [p * (p / q) ** strength for p, q in zip(P[:kept], Q[:kept], strict=True)]
    wanted = [sum(P[:kept]) * score / sum(scores) for score in scores]
    assert found.tolist() == pytest.approx([*wanted, *P[kept:]], 1e-9)
