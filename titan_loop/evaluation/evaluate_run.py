"""Held-out bits per byte of a run's newest checkpoint at several depths, beside n-gram baselines.

    run/config.json ─► model, sources, windows
    checkpoint ─► one pass to the largest depth ─► nats per window, depth and source ─┐
    the windows training has read ─► unigram and bigram counts ───────────────────────┴► DepthReport

The baselines are fitted on exactly the tokens the model has read, by replaying the loader, whose
order is a function of the seed and the position.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from titan_loop.checkpoint.choosing import newest_good
from titan_loop.checkpoint.model import load_model
from titan_loop.data.load.loader import HeldOutWindows, WindowLoader, held_out_windows
from titan_loop.errors import UserError
from titan_loop.evaluation.depth_report import DepthReport, summarise_source
from titan_loop.evaluation.ngram_baselines import BigramModel, TokenCounts, UnigramModel
from titan_loop.models.decoder import LoopDecoder
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.held_out import losses_at_depths, named_sources

ALL_SOURCES = "all"
_BATCH_WINDOWS = 8
_REPLAY_WINDOWS = 256

logger = logging.getLogger(__name__)


def evaluate_run(
    run_directory: RunDirectory, *, depths: Sequence[int], windows: int = 64
) -> DepthReport:
    """Score the newest committed checkpoint of a run that read prepared sources.

    Args:
        run_directory: The run.
        depths: Recurrent steps to score, each ≥ 1; may exceed the trained R.
        windows: Held-out windows per source, the same ones every time.

    Returns:
        The report, also saved in the run's `evals/`.

    Raises:
        UserError: No run, config or checkpoint there, depths or windows below 1, or a run without
            prepared sources.
    """
    if not depths or min(depths) < 1:
        raise UserError(f"depths={list(depths)} must name recurrent steps of at least 1")
    if windows < 1:
        raise UserError(f"windows={windows} must be at least 1")
    run_directory.read_run()
    config = run_directory.read_config()
    mixture = config["dataloader"].get("mixture")
    if not mixture:
        raise UserError(
            f"{run_directory.path} was imported or trained on generated data: it has no held-out "
            "text; score it with --tasks"
        )
    checkpoints = run_directory.path / config["checkpoint"]["folder"]
    newest = newest_good(checkpoints)
    if newest is None:
        raise UserError(f"{checkpoints} has no committed checkpoint; train first")
    step, manifest = newest
    checkpoint = checkpoints / f"step-{step}"
    seq_len = config["training"]["seq_len"]
    model = load_model(checkpoint, config["model"], max_seq_len=seq_len)
    data = manifest["data"]
    if data["accepted"]:
        logger.warning(
            "the data changed at window %d: the n-gram baselines count the last mixture from the "
            "start",
            data["accepted"][-1]["window"],
        )
    counts = _count_what_was_read(config, data["windows_consumed"], model)
    baselines = {"unigram": UnigramModel(counts), "bigram": BigramModel(counts)}

    loader_config = WindowLoader.Config(mixture=mixture)
    nats_per_source: dict[str, np.ndarray] = {}
    bytes_per_source: dict[str, np.ndarray] = {}
    baseline_nats: dict[str, dict[str, float]] = {}
    for name, source in named_sources(loader_config.source_paths()).items():
        held_out = held_out_windows(source, seq_len=seq_len, count=windows)
        nats_per_source[name] = score_windows(model, held_out, depths)
        bytes_per_source[name] = held_out.label_bytes.sum(dim=1).numpy()
        baseline_nats[name] = {
            baseline: float(fitted.nats(held_out.input.numpy(), held_out.labels.numpy()).sum())
            for baseline, fitted in baselines.items()
        }
        logger.info("scored %d held-out windows of %s", len(held_out.labels), source)
    if len(nats_per_source) > 1:
        total = name_of_total(nats_per_source)
        baseline_nats[total] = _totals(baseline_nats)
        nats_per_source[total] = np.concatenate([*nats_per_source.values()], axis=1)
        bytes_per_source[total] = np.concatenate([*bytes_per_source.values()])
    report = DepthReport(
        step=manifest["step"],
        tokens=manifest["trainer"]["tokens"],
        trained_recurrent_steps=manifest["trainer"]["recurrent_steps"],
        sources={
            name: summarise_source(depths, nats, bytes_per_source[name], baseline_nats[name])
            for name, nats in nats_per_source.items()
        },
    )
    report.save(run_directory)
    return report


def name_of_total(sources: Collection[str]) -> str:
    """Return what to call all sources together: "all", in parentheses if a source has that name."""
    name = ALL_SOURCES
    while name in sources:
        name = f"({name})"
    return name


def score_windows(model: LoopDecoder, windows: HeldOutWindows, depths: Sequence[int]) -> np.ndarray:
    """Return the summed negative log likelihood of every window at every depth.

    Args:
        model: An undistributed model.
        windows: W windows of L tokens.
        depths: Recurrent steps.

    Returns:
        (len(depths), W) float64, nats.
    """
    pieces = []
    for start in range(0, len(windows.labels), _BATCH_WINDOWS):
        part = slice(start, start + _BATCH_WINDOWS)
        ce_RBL = losses_at_depths(
            model, windows.input[part], windows.positions[part], windows.labels[part], [*depths]
        )
        pieces.append(ce_RBL.double().sum(dim=2))
    return torch.cat(pieces, dim=1).numpy()


def _count_what_was_read(
    config: Mapping[str, Any], windows_consumed: int, model: LoopDecoder
) -> TokenCounts:
    loader_config = config["dataloader"]
    loader = WindowLoader.Config(
        mixture=loader_config["mixture"],
        seed=loader_config["seed"],
        max_epochs=loader_config["max_epochs"],
        when_exhausted=loader_config["when_exhausted"],
        prefetch=False,
    ).build(dp_world_size=1, dp_rank=0, seq_len=config["training"]["seq_len"], local_batch_size=1)
    counts = TokenCounts(model.config.vocab_size)
    while loader.windows_consumed < windows_consumed:
        count = min(_REPLAY_WINDOWS, windows_consumed - loader.windows_consumed)
        for inputs, labels in loader.read_step(count):
            counts.add(inputs["input"].numpy(), labels.numpy())
    return counts


def _totals(baseline_nats: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    names = next(iter(baseline_nats.values()))
    return {name: sum(source[name] for source in baseline_nats.values()) for name in names}
