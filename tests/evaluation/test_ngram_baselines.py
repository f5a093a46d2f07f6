"""N-gram baselines against dictionaries of counts and fractions."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from titan_loop.data.labels import IGNORED
from titan_loop.errors import UserError
from titan_loop.evaluation.ngram_baselines import TokenCounts

V = 7


def windows(seed: int, count: int = 12, length: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and labels over V − 1 tokens (one token is never seen), some labels ignored."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, V - 1, (count, length + 1)) * generator.integers(0, 2)
    tokens = np.where(generator.random(tokens.shape) < 0.5, tokens, generator.integers(0, 3))
    inputs, labels = tokens[:, :-1], tokens[:, 1:].copy()
    labels[generator.random(labels.shape) < 0.1] = IGNORED
    return inputs, labels


def pair_list(inputs: np.ndarray, labels: np.ndarray) -> list[tuple[int, int]]:
    flat = zip(inputs.ravel().tolist(), labels.ravel().tolist(), strict=True)
    return [(a, b) for a, b in flat if b != IGNORED]


def fitted(seed: int, vocab_size: int = V) -> tuple[TokenCounts, list[tuple[int, int]]]:
    counts, seen = TokenCounts(vocab_size), []
    for chunk in range(3):
        inputs, labels = windows(seed + chunk)
        counts.add(inputs, labels)
        seen += pair_list(inputs, labels)
    return counts, seen


def unigram(seen: list[tuple[int, int]], b: int) -> Fraction:
    return Fraction(1 + sum(follower == b for _, follower in seen), len(seen) + V)


def bigram(seen: list[tuple[int, int]], a: int, b: int) -> Fraction:
    followers = Counter(follower for context, follower in seen if context == a)
    if not followers:
        return unigram(seen, b)
    distinct = len(followers)
    return (followers[b] + distinct * unigram(seen, b)) / (followers.total() + distinct)


@pytest.mark.parametrize("seed", [0, 10, 20])
def test_both_equal_brute_force(seed: int):
    counts, seen = fitted(seed)
    inputs, labels = windows(seed + 100)
    labels[0, :3], inputs[1, :3] = V - 1, V - 1  # a label and a context never seen
    nats = counts.nats(inputs, labels)
    for name, probability in (
        ("unigram", lambda a, b: unigram(seen, b)),
        ("bigram", lambda a, b: bigram(seen, a, b)),
    ):
        expected = [-math.log(probability(a, b)) for a, b in pair_list(inputs, labels)]
        assert np.allclose(nats[name], expected, rtol=1e-12)


def test_token_outside_the_vocabulary_is_refused():
    with pytest.raises(UserError, match="vocab_size=7 does not hold token 7; use at least 8"):
        TokenCounts(V).add(np.array([1]), np.array([7]))
