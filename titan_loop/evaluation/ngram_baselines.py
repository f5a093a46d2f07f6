"""Unigram and bigram token models, fitted on the model's training text, as baselines to beat.

    P(b)     = (c(b) + 1) / (n + V)                                 add-one unigram
    P(b | a) = (c(a, b) + t(a) P(b)) / (c(a) + t(a))                bigram, interpolated

c are counts, n their sum, V the vocabulary, t(a) the number of different tokens seen after a:
a context with many followers gives the unigram more weight. There is nothing to tune, and no token
has probability zero.

Source: Witten and Bell 1991, The zero-frequency problem, method C; as an interpolation in Chen and
Goodman 1998, section 2.5.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array

from titan_loop.data.labels import IGNORED
from titan_loop.errors import UserError

Integers = NDArray[np.integer]
Floats = NDArray[np.float64]


class TokenCounts:
    """Counts of tokens and of pairs, filled chunk by chunk.

    Given the model's own (input, label) arrays, it counts no pair across a document boundary and
    none whose label is ignored. `pairs_VV` has a row for each input and a column for each label.
    Memory is 12 bytes per distinct pair, twice that while a chunk is added.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.label_counts_V: NDArray[np.int64] = np.zeros(vocab_size, dtype=np.int64)
        self.pairs_VV = csr_array((vocab_size, vocab_size), dtype=np.int64)

    @property
    def tokens(self) -> int:
        """Number of tokens counted."""
        return int(self.label_counts_V.sum())

    def add(self, inputs: Integers, labels: Integers) -> None:
        """Count token ids and the label after each; raise `UserError` beyond the vocabulary."""
        contexts, followers = _pairs(inputs, labels, self.vocab_size)
        self.label_counts_V += np.bincount(followers, minlength=self.vocab_size)
        ones = np.ones(len(contexts), dtype=np.int64)
        self.pairs_VV += coo_array((ones, (contexts, followers)), self.pairs_VV.shape).tocsr()


class UnigramModel:
    """P(b) = (c(b) + 1) / (n + V)."""

    def __init__(self, counts: TokenCounts) -> None:
        smoothed = counts.label_counts_V + 1.0
        self.vocab_size = counts.vocab_size
        self.probability_V: Floats = smoothed / smoothed.sum()

    def nats(self, inputs: Integers, labels: Integers) -> Floats:
        """Return −ln P of every label in the shape of `labels`, 0 where ignored."""
        _, followers = _pairs(inputs, labels, self.vocab_size)
        return _in_place_of_labels(-np.log(self.probability_V[followers]), labels)


class BigramModel:
    """P(b | a) = (c(a, b) + t(a) P(b)) / (c(a) + t(a)); P(b) for a context never seen."""

    def __init__(self, counts: TokenCounts) -> None:
        self.unigram = UnigramModel(counts)
        self._pairs_VV = counts.pairs_VV
        self._distinct_V: Floats = np.diff(counts.pairs_VV.indptr).astype(float)
        self._total_V: Floats = np.asarray(counts.pairs_VV.sum(axis=1), dtype=float)

    def nats(self, inputs: Integers, labels: Integers) -> Floats:
        """Return −ln P(label | input) in the shape of `labels`, 0 where ignored."""
        contexts, followers = _pairs(inputs, labels, self.unigram.vocab_size)
        lower = self.unigram.probability_V[followers]
        distinct, total = self._distinct_V[contexts], self._total_V[contexts]
        seen = np.asarray(self._pairs_VV[contexts, followers])
        mass = total + distinct
        probability = np.where(mass > 0, (seen + distinct * lower) / np.maximum(mass, 1), lower)
        return _in_place_of_labels(-np.log(probability), labels)


def _pairs(
    inputs: Integers, labels: Integers, vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    assert inputs.shape == labels.shape, (inputs.shape, labels.shape)
    kept = labels != IGNORED
    contexts, followers = inputs[kept].astype(np.int64), labels[kept].astype(np.int64)
    largest = max(contexts.max(initial=0), followers.max(initial=0))
    if largest >= vocab_size:
        raise UserError(
            f"vocab_size={vocab_size} does not hold token {largest}; use at least {largest + 1}"
        )
    return contexts, followers


def _in_place_of_labels(nats: Floats, labels: Integers) -> Floats:
    result = np.zeros(labels.shape, dtype=np.float64)
    result[labels != IGNORED] = nats
    return result
