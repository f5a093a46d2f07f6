"""Held-out text: one way to open it, to score it and to summarise the scores.

`at_depths` reads a model at several depths, `at_readings` under any exit policy; the model may be
distributed. Either way one pass to the deepest step serves all readings.

Shapes: P readings, W windows, U units of the bootstrap, B windows of a batch, L tokens.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan_loop.data.labels import IGNORED
from titan_loop.data.load.held_out_windows import HeldOutWindows, held_out_windows
from titan_loop.data.load.mixture_sources import named_sources
from titan_loop.distributed.context_parallel import cut_columns
from titan_loop.errors import UserError, nearest, require_at_least
from titan_loop.evaluation.bits_per_byte import bootstrap_bits_per_byte
from titan_loop.evaluation.readings import Reading, score_states
from titan_loop.evaluation.share_work import share_work
from titan_loop.evaluation.suites import NotAskedError
from titan_loop.evaluation.task_report import ReadingResult, bits, unit_texts
from titan_loop.models.context import PREFIX, WindowShare
from titan_loop.models.decoder import LoopDecoder
from titan_loop.runs.saved_run import SavedRun

logger = logging.getLogger(__name__)

_SILENT_SECONDS = 20.0  # of a pass over many windows, then a line says how far it is
_BATCH_WINDOWS = 8
_FEWEST_DOCUMENTS = 10  # with fewer, windows are the units of the bootstrap

Sums = tuple[list[float], list[float]]  # of one window: a value and recurrent steps at each reading
Totals = tuple[NDArray[np.float64], NDArray[np.float64]]
"""A value and recurrent steps of P readings and W windows, each summed over a window's labels."""
Forward = Callable[[HeldOutWindows], tuple[Tensor, Tensor]]
"""Takes B windows; returns their value and recurrent steps, (P, B) each, summed over the labels."""
Divide = Callable[[Sequence[int], Callable[[Sequence[int]], list[Sums]]], list[Sums]]
"""Calls its second argument with the windows of this rank; returns the sums of all windows."""


class WindowScores(NamedTuple):
    """Scores of W windows at P readings.

    Attributes:
        nats_PW: Negative log likelihood, summed over a window's labels.
        steps_PW: Recurrent steps, summed over a window's labels.
        bytes_W: Bytes of text behind the labels.
        documents_W: Number of the document in which the window begins.
    """

    nats_PW: NDArray[np.float64]
    steps_PW: NDArray[np.float64]
    tokens_W: NDArray[np.int64]
    bytes_W: NDArray[np.int64]
    documents_W: NDArray[np.int64]

    @classmethod
    def of(cls, windows: HeldOutWindows, totals: Totals) -> "WindowScores":
        """Return the scores of windows with these nats and steps."""
        return cls(
            *totals,
            (windows.labels != IGNORED).sum(dim=1).numpy(),
            windows.label_bytes.sum(dim=1).numpy(),
            np.asarray(windows.documents or range(len(windows.labels)), dtype=np.int64),
        )

    def by_unit(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return nats (P, U) and bytes (U) of documents, or of windows where documents are few."""
        documents, unit_W = np.unique(self.documents_W, return_inverse=True)
        if len(documents) < _FEWEST_DOCUMENTS:
            return self.nats_PW, self.bytes_W
        unit_UW = unit_W == np.arange(len(documents))[:, None]
        return self.nats_PW @ unit_UW.T, unit_UW @ self.bytes_W


def open_sources(paths: Sequence[str], *, seq_len: int, count: int) -> dict[str, HeldOutWindows]:
    """Return name → held-out windows of prepared sources; log sources that cannot be scored.

    Raises `UserError` if none can.
    """
    require_at_least(1, windows=count)
    found: dict[str, HeldOutWindows] = {}
    faults: list[UserError] = []
    for name, path in named_sources(paths).items():
        try:
            found[name] = held_out_windows(path, seq_len=seq_len, count=count)
        except UserError as error:
            faults.append(error)
    if not found:
        raise faults[0]
    for fault in faults:
        logger.warning("not scored: %s", fault)
    return found


def open_run(
    run: SavedRun, *, count: int, sources: Sequence[str] = (), seq_len: int | None = None
) -> dict[str, HeldOutWindows]:
    """Return the held-out windows of a run's sources, or of others with the same tokenizer.

    Args:
        sources: Names of the run's sources, or folders of any; by default all of the run's, and
            `NotAskedError` if it has none.
    """
    own = named_sources([str(path) for path in run.sources])
    if not own and not sources:
        raise NotAskedError(
            f"{run.path} was imported, or trained on a pipeline or generated data: it has no "
            "held-out text; name prepared sources with --sources"
        )
    chosen = [*dict.fromkeys(own.get(name, name) for name in sources)] or list(own.values())
    for path in chosen if sources else ():
        if "://" not in path and not Path(path).is_dir():
            raise UserError(
                f"--sources {path} is neither a folder nor a source of {run.path}"
                + nearest(path, own)
            )
        run.check_source(Path(path))
    return open_sources(chosen, seq_len=seq_len or run.seq_len, count=count)


def at_depths(
    model: LoopDecoder,
    depths: Sequence[int],
    share: WindowShare | None = None,
    value: Callable[[tuple[Tensor, ...], Tensor], Tensor] | None = None,
) -> Forward:
    """Return a function that reads out the states of one pass at several depths.

    Args:
        model: May be distributed; every rank of its mesh then calls the function together.
        share: The part of every window this rank computes; None for all of it.
        value: Maps the states at the depths, (B, L, D) each, and the labels (B, L) to a value,
            summed over the labels, (P, B); by default nats, through the streamed head.
    """

    def nats(states: tuple[Tensor, ...], labels_BL: Tensor) -> Tensor:
        weight_PBL = torch.zeros(len(depths), *labels_BL.shape, device=labels_BL.device)
        _, ce_PBL = model.lm_head(states, labels_BL=labels_BL, weight_RBL=weight_PBL)
        return ce_PBL.double().sum(dim=2)

    @torch.no_grad()
    def forward(windows: HeldOutWindows) -> tuple[Tensor, Tensor]:
        input_BL, positions_BL, labels_BL, *_ = windows
        if (context := model.config.max_seq_len) < (length := input_BL.shape[1]):
            raise UserError(
                f"max_length={context} is shorter than the {length} tokens of a window of this "
                "task; raise it, or leave it out"
            )
        columns = windows.columns_for(model.config.columns) or {}
        masks = None
        if share is not None:
            masks = model.get_attention_masks(positions_BL, share, columns.get(PREFIX))
            input_BL, positions_BL, labels_BL = (
                part_BL[:, share.queries_L] for part_BL in (input_BL, positions_BL, labels_BL)
            )
            columns = cut_columns(columns, share, whole=windows.whole)
        output = model(
            input_BL,
            positions_BL,
            masks,
            recurrent_steps=max(depths),
            collect="all",
            columns=columns or None,
        )
        states = tuple(output.hidden_RBLD[depth - 1] for depth in depths)
        tokens_B = (labels_BL != IGNORED).sum(dim=1)
        steps_PB = torch.stack([depth * tokens_B for depth in depths])
        return (value or nats)(states, labels_BL), steps_PB

    return forward


def at_readings(
    model: LoopDecoder,
    readings: Sequence[Reading],
    share: WindowShare | None = None,
    value: Literal["nats_PT", "right_PT"] = "nats_PT",
) -> Forward:
    """Return a function that sums a field of `Scores` over the labels at every reading."""

    def value_and_steps(states: tuple[Tensor, ...], labels_BL: Tensor) -> Tensor:
        # All positions, so that every rank calls the head equally often.
        flat = [state_BLD.flatten(0, 1) for state_BLD in states]
        scores = score_states(model, flat, labels_BL.flatten(), readings)
        steps_PT = scores.step_PT * (labels_BL != IGNORED).flatten()
        sums_2PT = torch.stack([getattr(scores, value).double(), steps_PT.double()])
        return sums_2PT.unflatten(2, labels_BL.shape).sum(dim=3)

    deepest = max(reading.deepest_step for reading in readings)
    both = at_depths(model, range(1, deepest + 1), share, value_and_steps)
    return lambda windows: cast("tuple[Tensor, Tensor]", both(windows)[0].unbind())


def score_windows(
    windows: HeldOutWindows, forward: Forward, *, device: torch.device
) -> WindowScores:
    """Score windows with a model that is whole on every rank; see `sum_windows`."""
    return WindowScores.of(windows, sum_windows(windows, forward, device=device))


def sum_windows(
    windows: HeldOutWindows,
    forward: Forward,
    *,
    device: torch.device,
    batch_windows: int = _BATCH_WINDOWS,
    divide: Divide = share_work,
) -> Totals:
    """Return the sums of `forward` for all windows, equal on all ranks; collective."""

    def work(rows: Sequence[int]) -> list[Sums]:
        sums: list[Sums] = []
        told = time.monotonic()
        for start in range(0, len(rows), batch_windows):
            if time.monotonic() - told > _SILENT_SECONDS:
                logger.info("%d of %d windows", start, len(rows))
                told = time.monotonic()
            chosen = rows[start : start + batch_windows]
            value_PB, steps_PB = forward(windows.rows(chosen, device))
            sums += zip(value_PB.T.tolist(), steps_PB.T.tolist(), strict=True)
        return sums

    all_sums = divide(range(len(windows.labels)), work)
    value_PW, steps_PW = (
        np.asarray(values, dtype=np.float64).T for values in zip(*all_sums, strict=True)
    )
    return value_PW, steps_PW


def summarise(scores: WindowScores, readings: Sequence[str]) -> dict[str, ReadingResult]:
    """Return reading → bits per byte with its 95 % bootstrap interval, and nats per token."""
    tokens = int(scores.tokens_W.sum())
    nats_PU, bytes_U = scores.by_unit()
    intervals = bootstrap_bits_per_byte(nats_PU, bytes_U)
    nats_P, steps_P = scores.nats_PW.sum(axis=1), scores.steps_PW.sum(axis=1)
    return {
        name: ReadingResult(
            metrics={**bits(intervals[row]), "nats_per_token": float(nats_P[row]) / tokens},
            mean_steps=float(steps_P[row]) / tokens,
            units=unit_texts(bytes_U.tolist(), np.round(nats_PU[row], 2).tolist())
            if name.startswith("static:")
            else [],
        )
        for row, name in enumerate(readings)
    }


def with_total(scores: Mapping[str, WindowScores]) -> dict[str, WindowScores]:
    """Return the scores of every source, then of all sources together if there are several."""
    if len(scores) < 2:
        return dict(scores)
    nats, steps, tokens, n_bytes, documents = zip(*scores.values(), strict=True)
    after = np.cumsum([0, *(1 + part.max() for part in documents)])
    total = WindowScores(
        np.concatenate(nats, axis=1),
        np.concatenate(steps, axis=1),
        np.concatenate(tokens),
        np.concatenate(n_bytes),
        np.concatenate([part + first for part, first in zip(documents, after, strict=False)]),
    )
    return {**scores, name_of_total(scores): total}


def name_of_total(sources: Collection[str]) -> str:
    """Return a name for all sources together: "all", in parentheses if a source has that name."""
    name = "all"
    while name in sources:
        name = f"({name})"
    return name
