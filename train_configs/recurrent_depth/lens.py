"""Logit lens: the head's reading of the state after every layer of every recurrent step.

    question ─► states at its waypoints ─► final norm, head ─► right? margin, by step and layer

A waypoint is a position and the token that a model has to know there. A two-hop question has two:
the bridge at the first relation and the target at the second.

Source: recurrent-depth transformers, arXiv 2604.07822, §5.2 and Figure 4.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from titan_loop.analysis.drawing import Axes, depth_colors, draw_panels
from titan_loop.analysis.steps.findings import Figure, Findings, chosen_steps, open_task
from titan_loop.data.load.held_out_windows import HeldOutWindows
from titan_loop.data.tasks.task import Task
from titan_loop.evaluation.exam import question_windows
from titan_loop.inference.hooks import AFTER_LAYERS, HookPoint, Hooks
from titan_loop.inference.measures import logit_margin
from titan_loop.models.decoder import LoopDecoder


@dataclass(frozen=True)
class Lens:
    """Readings of one waypoint over the questions of a stratum.

    Attributes:
        accuracy: Share of questions whose waypoint is the likeliest token, (R, layers).
        margin: Mean over questions of `logit_margin` of the waypoint, (R, layers).
    """

    stratum: str
    waypoint: str
    accuracy: np.ndarray
    margin: np.ndarray


@torch.no_grad()
def logit_lens(
    model: LoopDecoder, task: Task, stratum: str, *, steps: int, count: int, batch_rows: int = 64
) -> list[Lens]:
    """Return the readings of every waypoint over `count` held-out questions of a stratum."""
    device = model.tok_embeddings.weight.device
    questions = task.held_out_questions(count, task.strata[stratum])
    windows = question_windows(model, task, stratum, questions)
    names = list(task.waypoints(questions[0]))
    at = torch.tensor([[task.waypoints(q)[name] for name in names] for q in questions])
    margins = []
    for start in range(0, count, batch_rows):
        rows = range(start, min(start + batch_rows, count))
        batch = windows.rows(rows, device)
        margins.append(_margins(model, batch, at[start : rows.stop].to(device), steps))
    margin = torch.cat(margins).double()
    right = (margin > 0).double()
    return [
        Lens(stratum, name, right[..., w].mean(0).numpy(), margin[..., w].mean(0).numpy())
        for w, name in enumerate(names)
    ]


def _margins(model: LoopDecoder, batch: HeldOutWindows, at_BW2: Tensor, steps: int) -> Tensor:
    """Return the margins of W waypoints in B windows, (B, R, layers, W), on the host."""
    position_BW, token_BW = at_BW2.unbind(-1)
    row_B1 = torch.arange(len(at_BW2), device=at_BW2.device).unsqueeze(1)
    visits: list[Tensor] = []

    def look(state_BLD: Tensor, hook: HookPoint) -> None:
        logits_BWV = model.readout(model.norm(state_BLD[row_B1, position_BW]))
        visits.append(logit_margin(logits_BWV, token_BW).cpu())

    with Hooks(model, [(AFTER_LAYERS, look)]):
        given = batch.input, batch.positions
        model(*given, recurrent_steps=steps, collect="last", columns=batch.columns or None)
    return torch.stack(visits, dim=1).unflatten(1, (steps, len(model.looped_layers())))


def analyse_lens(
    run: Path,
    *,
    strata: tuple[str, ...] = (),
    recurrent_steps: int | None = None,
    questions: int = 256,
) -> Findings:
    """Show after which layer and step the head predicts bridge and target (logit lens).

    For runs on a generated task. The final norm and the head are applied to the state after every
    layer of every step; a coda's layers are skipped. Table columns are STEP.LAYER. Writes
    evals/lens-step-N.json and a plot that `report` shows.

    Args:
        run: Run (its newest checkpoint is taken) or its checkpoints/step-N.
        strata: Strata of the task's exam; default all.
        recurrent_steps: R; default as in training.
        questions: Number of questions of each stratum.
    """
    loaded, task, names = open_task(run, strata, questions)
    steps = chosen_steps(recurrent_steps, loaded)
    lenses = [
        lens
        for name in names
        for lens in logit_lens(loaded.model, task, name, steps=steps, count=questions)
    ]
    visits = [f"{step + 1}.{layer + 1}" for step, layer in np.ndindex(lenses[0].margin.shape)]
    rows, results = [["stratum", "waypoint", *visits]], {}
    for lens in lenses:
        shares = lens.accuracy.ravel().round(5).tolist()
        rows.append([lens.stratum, lens.waypoint, *(f"{share:.0%}" for share in shares)])
        for visit, share in enumerate(shares, start=1):
            results[f"{task.name}/{lens.stratum}/lens_{lens.waypoint}/visit:{visit}"] = share
    read = [
        {**asdict(lens), "accuracy": lens.accuracy.tolist(), "margin": lens.margin.tolist()}
        for lens in lenses
    ]
    figure = Figure(
        "Logit lens",
        "Share of questions whose bridge or target is the head's likeliest token at its position.",
        partial(_draw, lenses),
    )
    return Findings(
        name="lens",
        loaded=loaded,
        record={"questions": questions, "strata": read},
        tables={"Logit lens by step and layer": rows},
        figures={"lens.png": figure},
        results=results,
    )


def _draw(lenses: Sequence[Lens], path: Path) -> Path:
    strata, (steps, layers) = list(dict.fromkeys(x.stratum for x in lenses)), lenses[0].margin.shape
    waypoints = list(dict.fromkeys(lens.waypoint for lens in lenses))
    colors = dict(zip(waypoints, depth_colors(len(waypoints)), strict=True))

    def draw(axes: Axes, stratum: str) -> None:
        for lens in (lens for lens in lenses if lens.stratum == stratum):
            values, color = 100 * lens.accuracy.ravel(), colors[lens.waypoint]
            visits = range(1, len(values) + 1)
            axes.plot(visits, values, "o-", markersize=3, color=color, label=lens.waypoint)
        axes.vlines(np.arange(layers, layers * steps, layers) + 0.5, -3, 103, "0.8", linewidth=0.8)
        axes.set_ylim(-3, 103)
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("layers visited; a grey line ends a step")

    end = f"{lenses[-1].accuracy[-1, -1]:.0%} of {strata[-1]}"
    title = f"After the last step, {lenses[-1].waypoint} is the likeliest token in {end}"
    label = "% of questions whose likeliest token is the waypoint"
    return draw_panels(strata, draw, path, title=title, label=label)
