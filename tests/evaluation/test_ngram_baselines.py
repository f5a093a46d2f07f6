"""N-gram baselines against counts and fractions, and the text they are fitted on."""

import json
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.evaluation.runs import write_checkpoint_of, write_run_of
from tests.support.tiny import SEQ_LEN
from titan_loop.data.labels import IGNORED
from titan_loop.data.load.windows import CutWindows
from titan_loop.errors import UserError
from titan_loop.evaluation import ngram_baselines as module
from titan_loop.evaluation.evaluate_tasks import evaluate_tasks
from titan_loop.evaluation.ngram_baselines import TokenCounts, sample_windows
from titan_loop.evaluation.task_options import TaskOptions
from titan_loop.runs.run_directory import RunDirectory

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


REAL_RUN_WINDOWS = 3_000_000_000_000 // SEQ_LEN


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Epoch and number of every training window that is read; more than 1,000 are an error."""
    found: list[tuple[int, int]] = []
    read_into = CutWindows.read_into

    def counted(self: CutWindows, epoch: int, number: int, window: object) -> None:
        found.append((epoch, number))
        assert len(found) <= 1000, "this would read the whole run"
        read_into(self, epoch, number, window)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(CutWindows, "read_into", counted)
    return found


def test_a_run_of_three_trillion_tokens_is_sampled(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read, caplog
):
    monkeypatch.setattr(module, "MOST_COUNTED_TOKENS", 300 * SEQ_LEN)
    run = write_run_of(source, tmp_path / "run")
    write_checkpoint_of(run, 3, windows_consumed=REAL_RUN_WINDOWS)
    with caplog.at_level("INFO", logger="titan_loop"):
        report = evaluate_tasks(run, TaskOptions(depths=(1, 2), windows=4), baselines=True)
    assert len(read) == 300 + 4  # four are held-out windows
    epochs = [epoch for epoch, _ in read[4:]]
    assert epochs == sorted(epochs)
    assert epochs[0] < 0.01 * epochs[-1]  # from the beginning to the end
    assert "count 9,600 of the 3,000,000,000,000 tokens" in caplog.text
    readings = report.tasks["held_out/source"]
    assert [*readings] == ["static:1", "static:2", "unigram", "bigram"]
    bits = [readings[name].metrics["bits_per_byte"] for name in ("unigram", "bigram")]
    assert bits[0] > bits[1] > 1


def test_the_baselines_count_repeated_text_again_and_no_other(source: Path, tmp_path: Path, read):
    run = RunDirectory(write_run_of(source, tmp_path / "run"))
    config = run.read_config()
    config["dataloader"]["unique_tokens"] = 8 * SEQ_LEN
    run.config_json.write_text(json.dumps(config))
    write_checkpoint_of(run.path, 3, windows_consumed=40)
    evaluate_tasks(run.path, TaskOptions(depths=(1,), windows=4), baselines=True)
    assert len(read) == 40 + 4
    assert len({*read[4:]}) == 8


def test_the_sample_covers_the_run_without_repetition():
    assert sample_windows(5, 10).tolist() == [0, 1, 2, 3, 4]
    for consumed in (11, 12_345, REAL_RUN_WINDOWS):
        chosen = sample_windows(consumed, 10)
        bounds = [part * consumed // 10 for part in range(11)]
        assert np.searchsorted(bounds, chosen, side="right").tolist() == list(range(1, 11))
    # Equal distances of 7 would hit one source of a mixture with period 7 every time.
    assert len(np.unique(sample_windows(7000, 1000) % 7)) == 7
