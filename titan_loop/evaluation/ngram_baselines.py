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
        contexts, followers = self._pairs(inputs, labels)
        self.label_counts_V += np.bincount(followers, minlength=self.vocab_size)
        ones = np.ones(len(contexts), dtype=np.int64)
        self.pairs_VV += coo_array((ones, (contexts, followers)), self.pairs_VV.shape).tocsr()

    def nats(self, inputs: Integers, labels: Integers) -> dict[str, Floats]:
        """Return model → −ln P of each label that is not ignored, in order."""
        contexts, followers = self._pairs(inputs, labels)
        unigram = (self.label_counts_V[followers] + 1.0) / (self.tokens + self.vocab_size)
        distinct = np.diff(self.pairs_VV.indptr).astype(float)[contexts]
        total = np.asarray(self.pairs_VV.sum(axis=1), dtype=float)[contexts]
        pairs = np.asarray(self.pairs_VV[contexts, followers], dtype=float)
        bigram = np.where(  # of a context never seen, the unigram
            total > 0, (pairs + distinct * unigram) / np.maximum(total + distinct, 1.0), unigram
        )
        return {"unigram": -np.log(unigram), "bigram": -np.log(bigram)}

    def _pairs(
        self, inputs: Integers, labels: Integers
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        assert inputs.shape == labels.shape, (inputs.shape, labels.shape)
        kept = labels != IGNORED
        contexts, followers = inputs[kept].astype(np.int64), labels[kept].astype(np.int64)
        largest = max(contexts.max(initial=0), followers.max(initial=0))
        if largest >= self.vocab_size:
            raise UserError(
                f"vocab_size={self.vocab_size} does not hold token {largest}; use at least "
                f"{largest + 1}"
            )
        return contexts, followers
