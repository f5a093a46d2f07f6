"""Costs of looping each span of a dense model's layers, measured before any training.

For every span of layers i … j, with g the span and h_i the state before it, held-out text is scored
with the layers after the span applied to

    bare     g(g(h_i))
    damped   m + (g(m) − m) / 2,   m = h_i + (g(h_i) − h_i) / 2

the two forms of R = 2. The dense model's states before and after a span are known, so measuring a
span runs only its own layers and the layers after it.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_loop.checkpoint.model import load_model
from titan_loop.data.load.held_out_windows import HeldOutWindows
from titan_loop.errors import UserError
from titan_loop.evaluation.bits_per_byte import paired_difference
from titan_loop.evaluation.intervals import Interval
from titan_loop.evaluation.share_work import rank_device
from titan_loop.evaluation.window_scores import (
    WindowScores,
    open_run,
    score_windows,
    summarise,
    with_total,
)
from titan_loop.families.retrofit.surgery import Dense, Surgery, opened
from titan_loop.formats.dense import UnrolledShape
from titan_loop.models.context import LoopContext
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import decoder_config
from titan_loop.storage.json_files import write_json
from titan_loop.tables import columns

logger = logging.getLogger(__name__)

TOLERATED_BITS = 0.1
"""Bits per byte that a recommended span may cost before training."""


class Span(NamedTuple):
    """Layers start … start + length − 1."""

    start: int
    length: int

    def __str__(self) -> str:
        return f"{self.start}-{self.start + self.length - 1}"


@dataclass(frozen=True, kw_only=True)
class SpanCost:
    """Increase in bits per byte over the dense model.

    Each cost is a value with the low and high end of its 95 % interval over documents.

    Attributes:
        bare: Cost of a second pass.
        damped: Cost of two half passes.
        unrolls: Whether llama.cpp runs the span twice, every visit a layer: of some models it knows
            one period of kinds of layers alone.
    """

    start: int
    length: int
    bare: tuple[float, float, float]
    damped: tuple[float, float, float]
    unrolls: bool = True


@dataclass(frozen=True, kw_only=True)
class Scan:
    """The measured table; `dense` is the bits per byte of the dense model.

    Attributes:
        spans: Costs, by length and then by start.
    """

    model: str
    dense: float
    bytes: int
    windows: int
    seq_len: int
    sources: list[str]
    n_layers: int
    spans: list[SpanCost]

    def best(self) -> dict[int, SpanCost]:
        """Return the span of each length whose second pass costs least."""
        lengths = sorted({span.length for span in self.spans})
        return {
            length: min(
                (span for span in self.spans if span.length == length), key=lambda s: s.bare[0]
            )
            for length in lengths
        }

    def recommended(self) -> SpanCost:
        """Return the longest of the best spans within `TOLERATED_BITS`, else the cheapest."""
        best = self.best().values()
        tolerated = [span for span in best if span.bare[0] <= TOLERATED_BITS]
        if tolerated:
            return max(tolerated, key=lambda span: span.length)
        return min(best, key=lambda span: span.bare[0])

    def table(self) -> str:
        """Return the costs as text, and the recommendation as flags."""
        rows = [("layers", "length", "bare", "damped", "gguf-unrolled")]
        for span in self.spans:
            name, runs = str(Span(span.start, span.length)), "yes" if span.unrolls else "no"
            rows.append((name, str(span.length), _signed(span.bare), _signed(span.damped), runs))
        chosen = self.recommended()
        coda = self.n_layers - chosen.start - chosen.length
        return "\n".join(
            [
                f"dense: {self.dense:.3f} bits per byte; costs of looping a span twice, untrained:",
                *columns(rows, left=(0,)),
                f"recommended: --prelude {chosen.start} --core {chosen.length} --coda {coda}",
            ]
        )

    def save(self, path: Path) -> Path:
        """Write the table as JSON and return its path."""
        record: dict[str, Any] = {**asdict(self), "recommended": asdict(self.recommended())}
        write_json(path, record)
        return path


def _signed(cost: tuple[float, float, float]) -> str:
    value, low, high = cost
    return f"{value:+.3f} ±{(high - low) / 2:.3f}"


def scan(
    path: Path,
    *,
    sources: Sequence[str],
    lengths: Sequence[int],
    windows: int,
    seq_len: int | None,
    command: Sequence[str],
) -> Scan:
    """Measure every span of the given lengths.

    Args:
        lengths: Numbers of layers of a span; none takes 4, 8 and 12, as far as a layer is left
            outside, or 1 in a smaller model.

    Raises:
        UserError: As `opened`; a length is below 1 or leaves no layer outside the span, or there
            is no held-out text.
    """
    with opened(path, command) as (dense, _):
        held_out = open_run(dense.run, count=windows, sources=sources, seq_len=seq_len)
        longest = max(text.input.shape[1] for text in held_out.values())
        device = rank_device()
        model = load_model(dense.checkpoint.path, dense.options, max_seq_len=longest).to(device)
    n_layers = len(model.layers)
    lengths = lengths or [length for length in (4, 8, 12) if length < n_layers] or [1]
    for length in lengths:
        if not 1 <= length < n_layers:
            raise UserError(f"--lengths {length} must be from 1 to {n_layers - 1}")
    spans = [Span(start, length) for length in lengths for start in range(n_layers - length + 1)]
    scores: dict[str, WindowScores] = {}
    for name, text in held_out.items():
        logger.info("%s: %d windows, %d spans", name, len(text.labels), len(spans))
        scores[name] = score_windows(text, _Spans(model, spans), device=device)
    total = [*with_total(scores).values()][-1]
    nats_PU, bytes_U = total.by_unit()
    dense_bits = summarise(
        total._replace(nats_PW=total.nats_PW[:1], steps_PW=total.steps_PW[:1]), ["dense"]
    )

    def cost(reading: int) -> tuple[float, float, float]:
        found: Interval = paired_difference(nats_PU[reading], nats_PU[0], bytes_U)
        return found.value, found.low, found.high

    return Scan(
        model=str(path),
        dense=dense_bits["dense"].metrics["bits_per_byte"],
        bytes=int(total.bytes_W.sum()),
        windows=windows,
        seq_len=longest,
        sources=[*held_out],
        n_layers=n_layers,
        spans=[
            SpanCost(
                start=span.start,
                length=span.length,
                bare=cost(1 + 2 * number),
                damped=cost(2 + 2 * number),
                unrolls=_unrolls(dense, span, n_layers),
            )
            for number, span in enumerate(spans)
        ],
    )


def _unrolls(dense: Dense, span: Span, n_layers: int) -> bool:
    coda = n_layers - span.start - span.length
    surgery = Surgery(mode="plain", prelude=span.start, core=span.length, coda=coda)
    architecture = decoder_config(surgery.options(dense.options), max_seq_len=1).architecture
    window = dense.run.config["training"]["seq_len"]
    try:
        shape = UnrolledShape.from_architecture(
            architecture, recurrent_steps=surgery.recurrent_steps, max_positions=window
        )
        shape.gguf_metadata()
    except UserError:
        return False
    return True


class _Spans:
    """Scores windows with the dense model, then with every span looped, bare and damped."""

    def __init__(self, model: LoopDecoder, spans: Sequence[Span]) -> None:
        self._model = model
        self._spans = spans

    @torch.no_grad()
    def __call__(self, windows: HeldOutWindows) -> tuple[Tensor, Tensor]:
        model, layers = self._model, range(len(self._model.layers))
        context = model.make_context(windows.input, windows.positions)
        states = [model.start(windows.input, context)]
        for layer in layers:
            states.append(self._through(range(layer, layer + 1), states[-1], context))
        nats = [self._nats(states[-1], windows.labels)]
        for start, length in self._spans:
            inside, behind = range(start, start + length), range(start + length, len(layers))
            before_BLD, after_BLD = states[start], states[start + length]
            bare_BLD = self._through(inside, after_BLD, context)
            half_BLD = before_BLD.lerp(after_BLD, 0.5)
            damped_BLD = half_BLD.lerp(self._through(inside, half_BLD, context), 0.5)
            nats += [
                self._nats(self._through(behind, state_BLD, context), windows.labels)
                for state_BLD in (bare_BLD, damped_BLD)
            ]
        nats_PB = torch.stack(nats)
        return nats_PB, torch.ones_like(nats_PB)

    def _through(self, layers: range, hidden_BLD: Tensor, context: LoopContext) -> Tensor:
        for layer in layers:
            hidden_BLD = self._model.layers[str(layer)](hidden_BLD, context)
        return hidden_BLD

    def _nats(self, hidden_BLD: Tensor, labels_BL: Tensor) -> Tensor:
        read_BLD = self._model.norm(hidden_BLD)
        weight_1BL = read_BLD.new_zeros(1, *labels_BL.shape)
        _, ce_1BL = self._model.lm_head((read_BLD,), labels_BL=labels_BL, weight_RBL=weight_1BL)
        return ce_1BL[0].double().sum(dim=1)
