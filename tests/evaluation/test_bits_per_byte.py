"""Bits per byte: the ratio, the bootstrap against an explicit loop, and its coverage."""

import math

import numpy as np
import pytest

from titan_loop.errors import UserError
from titan_loop.evaluation.bits_per_byte import (
    bits_per_byte,
    bootstrap_bits_per_byte,
    paired_difference,
)


def test_ratio_weighs_by_bytes():
    assert bits_per_byte([math.log(2) * 10, math.log(2) * 2], [4, 2]) == pytest.approx(2.0)
    with pytest.raises(UserError, match="0 bytes"):
        bits_per_byte([0.0], [0])


def test_interval_equals_an_explicit_resampling():
    generator = np.random.default_rng(3)
    n_bytes = generator.integers(50, 150, 40)
    nats = n_bytes * generator.normal(1.5, 0.3, (2, 40))
    resamples = 4000
    replicates = np.empty((2, resamples))
    for s in range(resamples):
        drawn = generator.integers(0, 40, 40)
        for r in range(2):
            replicates[r, s] = nats[r, drawn].sum() / math.log(2) / n_bytes[drawn].sum()
    ours = bootstrap_bits_per_byte(nats, n_bytes)  # by 2000
    for r, interval in enumerate(ours):
        assert interval.value == pytest.approx(bits_per_byte(nats[r], n_bytes))
        # Monte Carlo quantiles of 2000 and 4000 draws differ by some 6 % of the half width.
        half_width = (interval.high - interval.low) / 2
        expected = np.quantile(replicates[r], [0.025, 0.975])
        assert np.allclose([interval.low, interval.high], expected, atol=0.15 * half_width)


def test_pairing_removes_what_both_share():
    generator = np.random.default_rng(5)
    n_bytes = np.full(100, 200)
    hardness = generator.normal(300, 80, 100)
    shallow, deep = hardness + 10 + generator.normal(0, 2, 100), hardness
    difference = paired_difference(shallow, deep, n_bytes)
    assert difference.value == pytest.approx(
        bits_per_byte(shallow, n_bytes) - bits_per_byte(deep, n_bytes)
    )
    assert difference.low > 0
    (alone,) = bootstrap_bits_per_byte(deep[None], n_bytes)
    assert difference.high - difference.low < 0.1 * (alone.high - alone.low)


def test_windows_without_bytes_do_not_matter():
    nats, n_bytes = np.array([[5.0, 0.0, 7.0]]), np.array([3, 0, 4])
    padded = bootstrap_bits_per_byte(nats, n_bytes)
    assert padded == bootstrap_bits_per_byte(nats[:, [0, 2]], n_bytes[[0, 2]])
    with pytest.raises(UserError, match="0 bytes"):
        bootstrap_bits_per_byte(np.zeros((1, 2)), [0, 0])
