"""Held-out bits per byte of a run's newest checkpoint at several depths, beside n-gram baselines.

The baselines are fitted on tokens that the model has read: the order of a loader's windows is a
function of the seed and the position, so any of them can be read again.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titan_loop.data.load.loader import WindowLoader
from titan_loop.data.load.windows import empty_batch
from titan_loop.evaluation.depth_report import DepthReport, summarise_source
from titan_loop.evaluation.ngram_baselines import TokenCounts
from titan_loop.evaluation.readings import depth_readings
from titan_loop.evaluation.share_work import join_ranks, rank_device
from titan_loop.evaluation.window_scores import at_depths, open_run, score_windows, with_total
from titan_loop.inference.loading import load_checkpoint
from titan_loop.runs.saved_run import SavedRun

MOST_COUNTED_TOKENS = 1 << 24  # fitting the baselines on these takes about half a minute
_WINDOWS_AT_A_TIME = 256

logger = logging.getLogger(__name__)


def evaluate_run(
    path: Path,
    *,
    depths: Sequence[int],
    windows: int = 64,
    sources: Sequence[str] = (),
    seq_len: int | None = None,
    ema: bool = False,
) -> DepthReport:
    """Score a checkpoint on held-out text, beside n-gram models of the text it read; collective.

    Rank 0 also saves the report in the run's `evals/`.

    Args:
        path: A run (its newest whole checkpoint is taken) or a checkpoint.
        depths: Recurrent steps to score; may exceed the trained R.
        sources: As `open_run` takes them.
    """
    depth_readings(depths)  # refuses depths below 1
    rank, _ = join_ranks()
    device = rank_device()
    loaded = load_checkpoint(path, use="held_out", context_tokens=seq_len, device=device, ema=ema)
    held_out = open_run(loaded.run, count=windows, sources=sources, seq_len=seq_len)
    counts = TokenCounts(loaded.model.config.vocab_size)
    nats: dict[str, dict[str, float]] = {name: {} for name in held_out}
    if loaded.run.mixture:  # an import, or a run on generated data, has read no text
        _count_what_was_read(counts, loaded.run, loaded.manifest["data"])
        for name, part in held_out.items():
            found = counts.nats(part.input.numpy(), part.labels.numpy())
            nats[name] = {baseline: float(each.sum()) for baseline, each in found.items()}
    forward = at_depths(loaded.model, depths)
    scores = {name: score_windows(part, forward, device=device) for name, part in held_out.items()}
    kinds = {kind for part in nats.values() for kind in part}
    together = {kind: sum(part[kind] for part in nats.values()) for kind in sorted(kinds)[::-1]}
    report = DepthReport(
        step=loaded.manifest["step"],
        ema=ema,
        tokens=loaded.manifest["trainer"]["tokens"],
        trained_recurrent_steps=loaded.recurrent_steps,
        baseline_tokens=counts.tokens,
        sources={
            name: summarise_source(
                depths, *part.by_unit(), nats.get(name, together), windows=len(part.bytes_W)
            )
            for name, part in with_total(scores).items()
        },
    )
    if rank == 0:
        report.save(loaded.run.directory)
    return report


def _count_what_was_read(counts: TokenCounts, run: SavedRun, data: Mapping[str, Any]) -> None:
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
    for start in range(0, len(chosen), _WINDOWS_AT_A_TIME):
        identities = loader.locate(chosen[start : start + _WINDOWS_AT_A_TIME])
        (inputs, labels), windows = empty_batch(len(identities), seq_len)
        for identity, window in zip(identities, windows, strict=True):
            loader.fill_window(identity, window)
        counts.add(inputs["input"].numpy(), labels.numpy())


def sample_windows(consumed: int, most: int) -> np.ndarray:
    """Return all window numbers below `consumed`, or one drawn from each of `most` equal parts.

    Evenly spaced windows could all come from the same source of a periodic mixture.
    """
    if consumed <= most:
        return np.arange(consumed)
    bounds = np.arange(most + 1, dtype=np.int64) * consumed // most
    return np.random.default_rng(0).integers(bounds[:-1], bounds[1:])
