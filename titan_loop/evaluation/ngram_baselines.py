"""Unigram and bigram token models, fitted on the model's training text, as baselines to beat.

    P(b)     = (c(b) + 1) / (n + V)                                 add-one unigram
    P(b | a) = (c(a, b) + t(a) P(b)) / (c(a) + t(a))                bigram, interpolated

c are counts, n their sum, V the vocabulary, t(a) the number of different tokens seen after a:
a context with many followers gives the unigram more weight. There is nothing to tune, and no token
has probability zero. The text can be read again, since the order of a loader's windows is a
function of the seed and the position.

Source: Witten and Bell 1991, The zero-frequency problem, method C; as an interpolation in Chen and
Goodman 1998, section 2.5.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array

from titan_loop.data.labels import IGNORED
from titan_loop.data.load.held_out_windows import HeldOutWindows
from titan_loop.data.load.loader import WindowLoader
from titan_loop.data.load.windows import empty_batch
from titan_loop.errors import RunFailedError, UserError
from titan_loop.evaluation.bits_per_byte import bits_per_byte
from titan_loop.evaluation.task_report import TaskReport
from titan_loop.runs.saved_run import SavedRun

BASELINES = ("unigram", "bigram")
MOST_COUNTED_TOKENS = 1 << 24  # fitting the baselines on these takes about half a minute
_WINDOWS_AT_A_TIME = 256

Integers = NDArray[np.integer]
Floats = NDArray[np.float64]

logger = logging.getLogger(__name__)


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

    def add(self, inputs: Integers, labels: Integers) -> None:
        """Count token ids and the label after each; raise `UserError` beyond the vocabulary."""
        contexts, followers = self._pairs(inputs, labels)
        self.label_counts_V += np.bincount(followers, minlength=self.vocab_size)
        ones = np.ones(len(contexts), dtype=np.int64)
        self.pairs_VV += coo_array((ones, (contexts, followers)), self.pairs_VV.shape).tocsr()

    def nats(self, inputs: Integers, labels: Integers) -> dict[str, Floats]:
        """Return model → −ln P of each label that is not ignored, in order."""
        contexts, followers = self._pairs(inputs, labels)
        tokens = int(self.label_counts_V.sum())
        unigram = (self.label_counts_V[followers] + 1.0) / (tokens + self.vocab_size)
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


def baseline_bits(
    counts: TokenCounts, held_out: Mapping[str, HeldOutWindows], total: str
) -> dict[str, dict[str, float]]:
    """Return source → baseline → bits per byte of its windows; `total` names all together."""
    nats: dict[str, Counter[str]] = {total: Counter()}
    n_bytes: Counter[str] = Counter()
    for source, windows in held_out.items():
        found = counts.nats(windows.input.numpy(), windows.labels.numpy())
        nats[source] = Counter({name: float(each.sum()) for name, each in found.items()})
        nats[total] += nats[source]
        n_bytes[source] = int(windows.label_bytes.sum())
        n_bytes[total] += n_bytes[source]
    return {
        source: {name: bits_per_byte(of_source[name], n_bytes[source]) for name in BASELINES}
        for source, of_source in nats.items()
    }


def require_gain(report: TaskReport, baseline: str, share: float) -> None:
    """Raise `RunFailedError` unless bits per byte are at least `share` below a baseline's.

    The report's last source, which is all text together, is judged at the trained R.
    """
    name, readings = [*report.tasks.items()][-1]
    trained = f"static:{report.trained_recurrent_steps}"
    for reading, needed in (
        (baseline, "a run that has read prepared sources"),
        (trained, f"the trained R = {report.trained_recurrent_steps} among --depths"),
    ):
        if reading not in readings:
            raise UserError(f"--beats-{baseline} needs {needed}")
    bits, expected = (readings[each].metrics["bits_per_byte"] for each in (trained, baseline))
    if not bits <= (1 - share) * expected:
        raise RunFailedError(
            f"{bits:.3f} bits per byte ({name}, {trained}) are {1 - bits / expected:.1%} below "
            f"the {baseline} model's {expected:.3f}, not the {share:.0%} asked for; train longer, "
            "or look for the cause in the run's plots"
        )


def count_what_was_read(run: SavedRun, data: Mapping[str, Any], vocab_size: int) -> TokenCounts:
    """Count the tokens that training has read, or a sample of `MOST_COUNTED_TOKENS` of them."""
    if data["accepted"]:
        logger.warning(
            f"the data changed at window {data['accepted'][-1]['window']}: the n-gram baselines "
            "count the last mixture from the start"
        )
    recorded, seq_len = run.dataloader, run.seq_len
    names = ("mixture", "seed", "max_epochs", "when_exhausted", "unique_tokens")
    settings = {name: recorded[name] for name in names if name in recorded}  # or its default
    loader = WindowLoader.Config(**settings, prefetch=False).build(
        dp_world_size=1, dp_rank=0, seq_len=seq_len, local_batch_size=1
    )
    consumed = data["windows_consumed"]
    chosen = sample_windows(consumed, max(1, MOST_COUNTED_TOKENS // seq_len))
    if len(chosen) < consumed:
        logger.info(
            f"the n-gram baselines count {len(chosen) * seq_len:,} of the {consumed * seq_len:,} "
            "tokens read, spread evenly over the run"
        )
    counts = TokenCounts(vocab_size)
    for start in range(0, len(chosen), _WINDOWS_AT_A_TIME):
        identities = loader.locate(chosen[start : start + _WINDOWS_AT_A_TIME])
        (inputs, labels), windows = empty_batch(len(identities), seq_len)
        for identity, window in zip(identities, windows, strict=True):
            loader.fill_window(identity, window)
        counts.add(inputs["input"].numpy(), labels.numpy())
    return counts


def sample_windows(consumed: int, most: int) -> np.ndarray:
    """Return all window numbers below `consumed`, or one drawn from each of `most` equal parts.

    Evenly spaced windows could all come from the same source of a periodic mixture.
    """
    if consumed <= most:
        return np.arange(consumed)
    bounds = np.arange(most + 1, dtype=np.int64) * consumed // most
    return np.random.default_rng(0).integers(bounds[:-1], bounds[1:])
