"""Replace a state by the embedding of its decoded token, between two steps, without training.

    h ← (1 − α) h + α RMSNorm(W[argmax W h])      at one position, after one step

If a model answers more questions with it than without, its state already said which token the
position stands for, but the next step could not use it in that form.

Source: DiscoLoop, arXiv 2607.00341, §3.2 Eq. 3; the norm has no gain.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_loop.analysis.drawing import draw_axes, series_colors
from titan_loop.analysis.steps.findings import Figure, Findings, chosen_steps, open_task
from titan_loop.data.labels import IGNORED
from titan_loop.data.load.held_out_windows import HeldOutWindows
from titan_loop.data.tasks.task import Task
from titan_loop.errors import UserError, nearest
from titan_loop.evaluation.exam import question_windows
from titan_loop.models.decoder import LoopDecoder
from titan_loop.tables import columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@torch.no_grad()
def intervention(
    model: LoopDecoder,
    task: Task,
    stratum: str,
    *,
    strengths: Sequence[float],
    steps: int,
    count: int,
    waypoint: str | None = None,
    after: int = 1,
    batch_rows: int = 256,
) -> list[float]:
    """Return, for each strength α, the share of a stratum's questions that are answered right.

    Args:
        task: The task that the model was trained on.
        stratum: Name of a stratum, whose questions have the same waypoints.
        strengths: α, each from 0 to 1.
        steps: R.
        count: Largest number of different questions.
        waypoint: The waypoint at whose position the state is replaced; None for the first.
        after: Step after which the state is changed, below R.

    Raises:
        UserError: There is no such waypoint or no step after the intervention, or a strength is out
            of range.
    """
    if not 1 <= after < steps:
        raise UserError(f"after={after} must be at least 1 and below the {steps} recurrent steps")
    for strength in strengths:
        if not 0 <= strength <= 1:
            raise UserError(f"strengths={strength} must be between 0 and 1")
    questions = different_questions(task, stratum, count)
    count = len(questions)
    known = task.waypoints(questions[0])
    waypoint = waypoint or next(iter(known))
    if waypoint not in known:
        raise UserError(f"waypoint={waypoint}: {stratum} has none{nearest(waypoint, known)}")
    windows = question_windows(model, task, stratum, questions)
    device = model.tok_embeddings.weight.device
    position = torch.tensor([task.waypoints(q)[waypoint][0] for q in questions], device=device)
    right = torch.zeros(len(strengths), dtype=torch.float64)
    for start in range(0, count, batch_rows):
        rows = range(start, min(start + batch_rows, count))
        batch = windows.rows(rows, device)
        where_B = position[start : rows.stop]
        for index, strength in enumerate(strengths):
            state_BLD = _final_state(model, batch, where_B, strength, steps, after)
            said_BL = model.readout(state_BLD).argmax(dim=-1)
            agrees_BL = (said_BL == batch.labels) | (batch.labels == IGNORED)
            right[index] += agrees_BL.all(dim=1).sum().item()
    return (right / count).tolist()


def different_questions(task: Task, stratum: str, count: int) -> list[Any]:
    """Return at most `count` different held-out questions of a stratum."""
    drawn = task.held_out_questions(2 * count, task.strata[stratum])  # some are drawn twice
    return [*{task.identity(question): question for question in drawn}.values()][:count]


def several_waypoints(task: Task, names: Sequence[str]) -> list[str]:
    """Return the strata whose questions have a waypoint before the target."""
    first = {name: task.held_out_questions(1, task.strata[name])[0] for name in names}
    return [name for name, question in first.items() if len(task.waypoints(question)) > 1]


def _final_state(
    model: LoopDecoder,
    batch: HeldOutWindows,
    where_B: Tensor,
    strength: float,
    steps: int,
    after: int,
) -> Tensor:
    """Return the last state as the head reads it, (B, L, D), with one state replaced on the way."""
    context = model.make_context(batch.input, batch.positions, columns=batch.columns or None)
    carry = model.start(batch.input, context)
    row_B = torch.arange(len(where_B), device=where_B.device)
    hidden_BLD = model.step(carry, 1, context)
    for step in range(1, steps):
        if step == after:
            said_BL = model.readout(model.read(hidden_BLD, context, step)).argmax(dim=-1)
            token_BD = model.tok_embeddings(said_BL[row_B, where_B].unsqueeze(1))[:, 0]
            token_BD = F.rms_norm(token_BD, token_BD.shape[-1:]).to(hidden_BLD.dtype)
            hidden_BLD = hidden_BLD.clone()
            kept_BD = (1 - strength) * hidden_BLD[row_B, where_B]
            hidden_BLD[row_B, where_B] = kept_BD + strength * token_BD
        carry = model.advance(carry, hidden_BLD, step, context)
        hidden_BLD = model.step(carry, step + 1, context)
    return model.read(hidden_BLD, context, steps)


def analyse_intervention(
    run: Path,
    *,
    strengths: tuple[float, ...] = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0),
    strata: tuple[str, ...] = (),
    waypoint: str | None = None,
    after: int = 1,
    recurrent_steps: int | None = None,
    questions: int = 256,
) -> Findings:
    """Replace a state by the embedding of its decoded token, and grade the answers (DiscoLoop).

    For runs on a generated task, whose exam gives the questions. Between two steps the state at a
    waypoint, such as the bridge of two hops, is mixed with the normed embedding of its likeliest
    token. Writes evals/intervention-step-N.json and a plot that `report` shows.

    Args:
        run: Run (its newest checkpoint is taken) or its checkpoints/step-N.
        strengths: Shares of the embedding in the mixture, from 0 to 1.
        strata: Strata of the task's exam; default every stratum whose questions have more than one
            waypoint.
        waypoint: Waypoint of the task whose state is replaced; default the first.
        after: Step after which the state is changed.
        recurrent_steps: R; default as in training.
        questions: Number of questions of each stratum.
    """
    loaded, task, names = open_task(run, strata, questions)
    names = names if strata else several_waypoints(task, names)
    how: Any = {"strengths": strengths, "steps": chosen_steps(recurrent_steps, loaded)}
    how |= {"count": questions, "waypoint": waypoint, "after": after}
    found = {name: intervention(loaded.model, task, name, **how) for name in names}
    rows = [["stratum", *(f"{strength:g}" for strength in strengths)]]
    rows += [[name, *(f"{share:.3f}" for share in shares)] for name, shares in found.items()]
    record = {"task": task.name, "questions": questions, "after": after}
    results = {
        f"{task.name}/{name}/intervention/alpha:{strength:g}": round(share, 5)
        for name, shares in found.items()
        for strength, share in zip(strengths, shares, strict=True)
    }
    figure = Figure(
        "States replaced by embeddings",
        "Share of right answers when the state at a waypoint is mixed, between two steps, with "
        "the embedding of the token that it decodes to.",
        partial(_draw, found, strengths),
    )
    return Findings(
        name="intervention",
        loaded=loaded,
        record={**record, "strengths": strengths, "accuracy": found},
        lines=columns(rows),
        figures={"intervention.png": figure},
        results=results,
    )


def _draw(found: Mapping[str, Sequence[float]], strengths: Sequence[float], path: Path) -> Path:
    def draw(axes: "Axes") -> None:
        for name, color in series_colors([*found]).items():
            percent = [100 * share for share in found[name]]
            axes.plot(strengths, percent, color=color, marker="o", label=name)
        axes.set_ylim(-3, 103)
        axes.set_xlabel("share of the embedding in the state")
        axes.set_ylabel("% right")

    name, shares = max(found.items(), key=lambda item: max(item[1]) - item[1][0])
    most = max(range(len(shares)), key=shares.__getitem__)
    title = f"{name}: {shares[0]:.1%} right without the embedding, {shares[most]:.1%} with "
    return draw_axes(draw, path, title=f"{title}{strengths[most]:g} of it")
