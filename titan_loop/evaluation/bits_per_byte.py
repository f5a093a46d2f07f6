"""Bits per byte with bootstrap intervals: pure functions on summed losses.

    bits per byte = Σ_i nats_i / (ln 2 · Σ_i bytes_i)

A unit i is a document or a window. Units are treated as independent draws; tokens cannot be, since
neighbours share their context. Bits per byte compare models with different vocabularies.
Shapes: R depths, W units.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from titan_loop.errors import UserError
from titan_loop.evaluation.intervals import Interval, of_seeds

Floats = NDArray[np.float64]

_RESAMPLES = 2000
_COUNTS_PER_CHUNK = 1 << 22  # 32 MiB, so that memory does not grow with the resamples


def bits_per_byte(nats: ArrayLike, n_bytes: ArrayLike) -> float:
    """Return Σ nats / (ln 2 · Σ bytes) over all units; raise `UserError` if there are no bytes."""
    total_bytes = float(np.sum(np.asarray(n_bytes, dtype=np.float64)))
    if total_bytes <= 0:
        raise UserError("held-out text has 0 bytes; give at least one window with targets")
    return float(np.sum(np.asarray(nats, dtype=np.float64))) / (math.log(2) * total_bytes)


def bootstrap_bits_per_byte(nats_RW: ArrayLike, bytes_W: ArrayLike) -> list[Interval]:
    """Return bits per byte of every row with a 95 % percentile bootstrap interval over units.

    Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 13.
    """
    nats, n_bytes = np.asarray(nats_RW, dtype=np.float64), np.asarray(bytes_W, dtype=np.float64)
    assert nats.shape == (len(nats), *n_bytes.shape), (nats.shape, n_bytes.shape)
    # Units without a byte (windows of padding) would let a replicate divide by zero.
    nats, n_bytes = nats[:, n_bytes > 0], n_bytes[n_bytes > 0]
    values = [bits_per_byte(row, n_bytes) for row in nats]
    replicates = _replicates(nats, n_bytes)
    low, high = np.quantile(replicates, [0.025, 0.975], axis=1)
    return [Interval(*map(float, triple)) for triple in zip(values, low, high, strict=True)]


def paired_difference(nats: ArrayLike, other_nats: ArrayLike, bytes_W: ArrayLike) -> Interval:
    """Return bits per byte of the first minus the second, both on the same units.

    For one pair the interval is a percentile bootstrap over units; with one row per seed it covers
    seeds and units (`of_seeds`).

    Args:
        nats: (W,), or (S, W) for S seeds; their mean is the estimate.
        other_nats: The same shape; row s is the other model's with the same seed.
    """
    difference_SW = np.atleast_2d(np.asarray(nats, dtype=np.float64) - np.asarray(other_nats))
    n_bytes = np.asarray(bytes_W, dtype=np.float64)
    difference_SW, n_bytes = difference_SW[:, n_bytes > 0], n_bytes[n_bytes > 0]
    mean_1W = difference_SW.mean(axis=0, keepdims=True)
    value = bits_per_byte(mean_1W[0], n_bytes)
    replicates = _replicates(mean_1W, n_bytes)
    if len(difference_SW) > 1:
        by_seed = [bits_per_byte(row, n_bytes) for row in difference_SW]
        return of_seeds(by_seed, float(replicates.var()))
    low, high = np.quantile(replicates, [0.025, 0.975])
    return Interval(value, float(low), float(high))


def _replicates(nats_RW: Floats, bytes_W: Floats) -> Floats:
    """Return bits per byte of every row, (R, resamples)."""
    generator = np.random.default_rng(0)
    units = len(bytes_W)
    chunks: list[Floats] = []
    most = max(_COUNTS_PER_CHUNK // units, 1)
    for done in range(0, _RESAMPLES, most):
        size = min(most, _RESAMPLES - done)
        counts = generator.multinomial(units, np.full(units, 1 / units), size=size)
        chunks.append(counts @ nats_RW.T / (math.log(2) * (counts @ bytes_W))[:, None])
    return np.concatenate(chunks).T
