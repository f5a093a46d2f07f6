"""Coordinate check: whether states and updates stay level as a model grows wider, or loops more.

    run's options at every width and R ─► a few updates on held-out windows ─► sizes, table, plot

    size     RMS of the state after the last layer visit
    moved    RMS of its change by k updates; the same of the logits

A rate serves all widths and R if the lines are level, as `model.base_width` and
`model.branch_scale` are made for.

Source: Yang et al. 2022, arXiv 2203.03466, Appendix D.1.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_loop.analysis.drawing import Axes, depth_colors, draw_panels
from titan_loop.analysis.steps.findings import Figure, Findings
from titan_loop.data.labels import IGNORED
from titan_loop.errors import UserError, require_at_least
from titan_loop.evaluation.window_scores import open_run
from titan_loop.inference.loading import load_checkpoint
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import ModelOptions, build_decoder, resolved_shape
from titan_loop.runs.saved_run import SavedRun
from titan_loop.training.optimizer import AdamWConfig, LoopOptimizers, MuonConfig

_ROWS = 4  # windows of an update


class Coordinates(NamedTuple):
    """Sizes of one model.

    Attributes:
        size: RMS of the state at the start.
        moved: RMS of its change by the first update, and by all.
        logits_moved: The same of the logits.
        loss: Nats per token before the last update.
    """

    width: int
    recurrent_steps: int
    size: float
    moved: tuple[float, float]
    logits_moved: tuple[float, float]
    loss: float


def analyse_coordinates(
    run: Path,
    *,
    widths: tuple[int, ...] = (64, 128, 256),
    recurrent_steps: tuple[int, ...] = (1, 2, 4, 8),
    updates: int = 8,
    rate: float | None = None,
    base_width: int | None = None,
    branch_scale: float | None = None,
) -> Findings:
    """Train new models of a run's kind for a few updates, and compare their changes.

    Heads keep their width; the feed-forward grows with the model. Writes
    evals/coordinates-step-N.json and a plot that `report` shows.

    Args:
        run: Run, for its options, optimiser and held-out text.
        widths: Widths D, multiples of the width of a head.
        recurrent_steps: Numbers of recurrent steps R.
        updates: Updates of each model.
        rate: Learning rate; default the largest of the run's schedule.
        base_width: Option of the new models, 0 for no rule; default the run's.
        branch_scale: The same.
    """
    require_at_least(2, updates=updates)
    loaded = load_checkpoint(run)
    tokens_WL, labels_WL = _windows(loaded.run, updates * _ROWS)
    chosen = _largest_rate(loaded.run) if rate is None else rate
    if not 0 < chosen < 1:
        raise UserError(f"rate={chosen} must be above 0 and below 1")
    options = loaded.run.model_options
    for name, value in {"base_width": base_width, "branch_scale": branch_scale}.items():
        if value is None:
            continue
        if name not in asdict(options):
            raise UserError(f"{name}={value}: family {options.family} has no such option")
        options = replace(options, **{name: value})
    found = [
        coordinates(loaded.run, _of_width(options, width, steps), tokens_WL, labels_WL, rate=chosen)
        for steps in recurrent_steps
        for width in widths
    ]
    by_all = f"by {updates}"
    rows = [["R", "width", "state", "moved by 1", by_all, "logits by 1", by_all, "loss"]]
    for each in found:
        sizes = (each.size, *each.moved, *each.logits_moved, each.loss)
        rows.append([str(each.recurrent_steps), str(each.width), *(f"{x:.3g}" for x in sizes)])
    moved = [each.moved[1] for each in found]
    spread = max(moved) / min(moved)
    furthest = f"states move {spread:.2f} times as far in the model that moves furthest"
    figure = Figure(
        "Coordinates",
        f"How far states and logits move in {updates} updates, by width and R; level lines mean "
        "that one rate serves all.",
        partial(_draw, found, furthest),
    )
    return Findings(
        name="coordinates",
        loaded=loaded,
        record={"rate": chosen, "updates": updates, "coordinates": [e._asdict() for e in found]},
        tables={f"Coordinates at a rate of {chosen:g}": rows},
        lines=[furthest],
        figures={"coordinates.png": figure},
    )


def coordinates(
    run: SavedRun, options: ModelOptions, tokens_WL: Tensor, labels_WL: Tensor, *, rate: float
) -> Coordinates:
    """Return the sizes of a new model after an update on every `_ROWS` windows; see the module."""
    torch.manual_seed(0)
    model = build_decoder(options, max_seq_len=tokens_WL.shape[1])
    optimizers = _optimizers(run, model)
    optimizers.set_learning_rate(rate)
    seen = []
    loss = torch.zeros(())
    for tokens_BL, labels_BL in zip(tokens_WL.split(_ROWS), labels_WL.split(_ROWS), strict=True):
        seen.append(looked_at(model, tokens_WL[:_ROWS]))
        hidden_BLD = model(tokens_BL, collect="last").hidden_RBLD[-1]
        loss = F.cross_entropy(
            model.readout(hidden_BLD).flatten(0, 1), labels_BL.flatten(), ignore_index=IGNORED
        )
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
    last = looked_at(model, tokens_WL[:_ROWS])
    moved, logits_moved = (
        (_rms(first - start), _rms(end - start))
        for start, first, end in zip(seen[0], seen[1], last, strict=True)
    )
    shape = resolved_shape(options)
    sizes = _rms(seen[0][0]), moved, logits_moved, loss.item()
    return Coordinates(shape.dim, shape.recurrent_steps, *sizes)


def _of_width(options: ModelOptions, width: int, steps: int) -> ModelOptions:
    shape = resolved_shape(options)
    head = shape.dim // shape.n_heads
    if width < head or width % head:
        raise UserError(f"widths={width} must be a multiple of {head}, the width of a head")
    heads = width // head
    kv_heads = max(1, heads * (shape.n_kv_heads or shape.n_heads) // shape.n_heads)
    hidden_dim = max(8, shape.hidden_dim * width // shape.dim // 8 * 8)
    wider = replace(shape, dim=width, n_heads=heads, n_kv_heads=kv_heads, hidden_dim=hidden_dim)
    return replace(options, **asdict(replace(wider, recurrent_steps=steps)))


def _largest_rate(run: SavedRun) -> float:
    if "learning_rate" not in run.config:
        raise UserError(f"{run.path} was not trained here and has no schedule; give --rate")
    return max(float(knot["value"]) for knot in run.config["learning_rate"]["knots"])


def _optimizers(run: SavedRun, model: LoopDecoder) -> LoopOptimizers:
    """Return the optimisers of a run's config, without its average of the weights."""
    config = LoopOptimizers.Config(
        name="muon" if run.optimizer == "muon" else "adamw",
        adamw=AdamWConfig(**run.config.get("adamw", {})),
        muon=MuonConfig(**run.config.get("muon", {})),
    )
    return config.build(model_parts=[model])


def _windows(run: SavedRun, count: int) -> tuple[Tensor, Tensor]:
    """Return (W, L) tokens and labels of `count` held-out windows, of all sources in turn."""
    if not run.sources:
        raise UserError(f"{run.path} has no held-out text; give a run that was trained on text")
    sources = open_run(run, count=count).values()
    rows = zip(*(zip(found.input, found.labels, strict=True) for found in sources), strict=False)
    turns = [window for row in rows for window in row][:count]
    if len(turns) < count:
        raise UserError(
            f"updates={count // _ROWS} need {count} held-out windows, {run.path} has {len(turns)} "
            "in equal parts; ask for fewer"
        )
    tokens, labels = (torch.stack(part) for part in zip(*turns, strict=True))
    return tokens, labels


@torch.no_grad()
def looked_at(model: LoopDecoder, tokens_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state after the last layer visit, and the logits."""
    seen: list[Tensor] = [torch.zeros(())]

    def observe(state_BLD: Tensor, step: int | Tensor | None, layer: int) -> None:
        if step is not None:
            seen[0] = state_BLD

    model.observe = observe
    model.eval()  # a start state may be noise that is drawn anew in training
    logits = model.readout(model(tokens_BL, collect="last").hidden_RBLD[-1])
    model.train()
    model.observe = None
    return seen[0], logits


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _draw(found: Sequence[Coordinates], title: str, path: Path) -> Path:
    depths = list(dict.fromkeys(each.recurrent_steps for each in found))
    panels = {
        "state": lambda each: each.size,
        "change of the state": lambda each: each.moved[1],
        "change of the logits": lambda each: each.logits_moved[1],
    }

    def draw(axes: Axes, name: str) -> None:
        for steps, color in zip(depths, depth_colors(len(depths)), strict=True):
            mine = [each for each in found if each.recurrent_steps == steps]
            values = [panels[name](each) for each in mine]
            widths = [each.width for each in mine]
            axes.plot(widths, values, "o-", color=color, label=f"R = {steps}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("width D")

    return draw_panels([*panels], draw, path, title=title, label="RMS")
