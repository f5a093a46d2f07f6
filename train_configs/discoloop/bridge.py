"""The bridge of a question in the state: how clearly it is said, and in which form.

    P_r = softmax(W norm(h_r))_b     c_r = cos(h_r, W[b])     e_r = cos(input of step r + 1, W[b])

at the bridge b of each question, after every step r (`analyse bridge`). In a plain loop the next
step starts from h_r, so e_r = c_r. DiscoLoop adds the embedding of decoded tokens first, so e_r
shows its channel's work. A bridge that is decoded but lies far from its embedding asks the next
step to look up a fact in a form that training has never shown it. h_r is the state that the next
step receives: where the norm stands at the readout alone, it has not been normed.

    h ← (1 − α) h + α RMSNorm(W[argmax W h])     at the bridge, after the first step

without training (`analyse intervention`; the norm has no gain). If a model answers more questions
with it than without, its state already said the bridge, but the next step could not use that form.

Source: DiscoLoop, arXiv 2607.00341, §3.2: Table 1(b), which has P_1 and c_1 of the plain loop, and
Eq. 3. Deviation: each question counts once; e_r is ours.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_loop.analysis.drawing import Axes, draw_axes, draw_panels, series_colors
from titan_loop.analysis.steps.findings import Figure, Findings, chosen_steps, open_task
from titan_loop.data.labels import IGNORED
from titan_loop.data.load.held_out_windows import HeldOutWindows
from titan_loop.data.tasks.task import Task
from titan_loop.errors import UserError
from titan_loop.evaluation.exam import question_windows
from titan_loop.inference.loading import Loaded
from titan_loop.models.decoder import LoopDecoder

_BATCH_ROWS = 256


class BridgeStates(NamedTuple):
    """Means over a stratum's questions after each step, (R,); `entering` lacks the last, (R − 1,).

    Attributes:
        probability: P_r, from 0 to 1.
        cosine: c_r, from −1 to 1.
        entering: e_r.
    """

    probability: np.ndarray
    cosine: np.ndarray
    entering: np.ndarray


@torch.no_grad()
def bridge_states(
    model: LoopDecoder, task: Task, stratum: str, *, steps: int, count: int
) -> BridgeStates:
    """Return the readings of the first waypoint of at most `count` different questions."""
    sums, questions = np.zeros((3, steps)), 0
    for batch, position_B, token_B in _batches(model, task, stratum, count):
        questions += len(token_B)
        where = torch.arange(len(token_B), device=token_B.device), position_B
        context = model.make_context(batch.input, batch.positions, columns=batch.columns or None)
        carry = model.start(batch.input, context)
        for step in range(steps):
            hidden_BLD = model.step(carry, step + 1, context)
            read_BD = model.read(hidden_BLD, context, step + 1)[where]
            logit_BV = model.readout(read_BD.unsqueeze(1))[:, 0]
            said_BV = logit_BV.float().softmax(dim=-1)
            sums[0, step] += said_BV.gather(1, token_B.unsqueeze(1)).sum().item()
            sums[1, step] += _cosines(model, hidden_BLD[where], token_B)
            if step + 1 < steps:
                carry = model.advance(carry, hidden_BLD, step + 1, context)
                sums[2, step] += _cosines(model, model.input(carry, context)[where], token_B)
    probability, cosine, entering = sums / questions
    return BridgeStates(probability, cosine, entering[:-1])


def _cosines(model: LoopDecoder, state_BD: Tensor, token_B: Tensor) -> float:
    """Return the sum over B of the cosines of states to tokens' embeddings."""
    embedding_BD = model.tok_embeddings(token_B.unsqueeze(1))[:, 0]
    return F.cosine_similarity(state_BD.float(), embedding_BD.float(), dim=-1).sum().item()


@torch.no_grad()
def intervention(
    model: LoopDecoder,
    task: Task,
    stratum: str,
    *,
    strengths: Sequence[float],
    steps: int,
    count: int,
) -> list[float]:
    """Return, for each strength α, the share of a stratum's questions that are answered right."""
    right, questions = torch.zeros(len(strengths), dtype=torch.float64), 0
    for batch, position_B, _ in _batches(model, task, stratum, count):
        questions += len(position_B)
        for index, strength in enumerate(strengths):
            state_BLD = _final_state(model, batch, position_B, strength, steps)
            said_BL = model.readout(state_BLD).argmax(dim=-1)
            agrees_BL = (said_BL == batch.labels) | (batch.labels == IGNORED)
            right[index] += agrees_BL.all(dim=1).sum().item()
    return (right / questions).tolist()


def _final_state(
    model: LoopDecoder, batch: HeldOutWindows, where_B: Tensor, strength: float, steps: int
) -> Tensor:
    """Return the last state as the head reads it, (B, L, D), with one state replaced on the way."""
    context = model.make_context(batch.input, batch.positions, columns=batch.columns or None)
    carry = model.start(batch.input, context)
    row_B = torch.arange(len(where_B), device=where_B.device)
    hidden_BLD = model.step(carry, 1, context)
    said_BL = model.readout(model.read(hidden_BLD, context, 1)).argmax(dim=-1)
    token_BD = model.tok_embeddings(said_BL[row_B, where_B].unsqueeze(1))[:, 0]
    token_BD = F.rms_norm(token_BD, token_BD.shape[-1:]).to(hidden_BLD.dtype)
    hidden_BLD = hidden_BLD.clone()
    kept_BD = (1 - strength) * hidden_BLD[row_B, where_B]
    hidden_BLD[row_B, where_B] = kept_BD + strength * token_BD
    for step in range(1, steps):
        carry = model.advance(carry, hidden_BLD, step, context)
        hidden_BLD = model.step(carry, step + 1, context)
    return model.read(hidden_BLD, context, steps)


def _batches(
    model: LoopDecoder, task: Task, stratum: str, count: int
) -> Iterator[tuple[HeldOutWindows, Tensor, Tensor]]:
    """Yield different questions, with position and token of each one's first waypoint."""
    drawn = task.held_out_questions(2 * count, task.strata[stratum])  # some are drawn twice
    questions = [*{task.identity(question): question for question in drawn}.values()][:count]
    windows, device = question_windows(model, task, stratum, questions), model.tok_embeddings
    first = [next(iter(task.waypoints(question).values())) for question in questions]
    at = torch.tensor(first, device=device.weight.device)
    for start in range(0, len(questions), _BATCH_ROWS):
        rows = range(start, min(start + _BATCH_ROWS, len(questions)))
        position_B, token_B = at[start : rows.stop].unbind(-1)
        yield windows.rows(rows, at.device), position_B, token_B


def _open(run: Path, strata: tuple[str, ...], questions: int) -> tuple[Loaded, Task, list[str]]:
    """Return a run, its task, and the strata to ask: all whose questions have a bridge."""
    loaded, task, names = open_task(run, strata, questions)
    first = {name: task.held_out_questions(1, task.strata[name])[0] for name in names}
    if not strata:
        names = [name for name, question in first.items() if len(task.waypoints(question)) > 1]
    if not names:
        raise UserError(f"{task.name} asks nothing by a bridge; name its strata with --strata")
    return loaded, task, names


def analyse_bridge(
    run: Path,
    *,
    strata: tuple[str, ...] = (),
    recurrent_steps: int | None = None,
    questions: int = 400,
) -> Findings:
    """Measure how clearly states say the bridge, and how near they are to its embedding.

    For runs on a generated task: after every step, at the position of a question's first waypoint,
    the head's probability of that token, and the cosine of its embedding to the state and to the
    input of the next step (DiscoLoop, Table 1b). Writes evals/bridge-step-N.json and a plot that
    `report` shows.

    Args:
        run: Run (its newest checkpoint is taken) or its checkpoints/step-N.
        strata: Strata of the task's exam; default every stratum whose questions have more than one
            waypoint.
        recurrent_steps: R; default as in training.
        questions: Largest number of different questions of each stratum.
    """
    loaded, task, names = _open(run, strata, questions)
    steps = chosen_steps(recurrent_steps, loaded)
    found = {
        name: bridge_states(loaded.model, task, name, steps=steps, count=questions)
        for name in names
    }
    rows = [["stratum", "step", "P(bridge)", "cosine of the state", "of the next step's input"]]
    results: dict[str, float] = {}
    for name, states in found.items():
        for step in range(1, steps + 1):
            numbers = {
                part: round(float(values[step - 1]), 5)
                for part, values in states._asdict().items()
                if step <= len(values)
            }
            cells = [*(f"{value:.3f}" for value in numbers.values()), ""][:3]
            rows.append([name, str(step), *cells])
            for part, value in numbers.items():
                results[f"{task.name}/{name}/bridge_{part}/static:{step}"] = value
    figure = Figure(
        "The bridge in the state",
        "Probability of the bridge at its position after every step, and the cosine of its "
        "embedding to the input of the next step, which is the state itself in a plain loop.",
        partial(_draw_bridge, found),
    )
    return Findings(
        name="bridge",
        loaded=loaded,
        record={"questions": questions, "recurrent_steps": steps},
        tables={"The bridge at its position": rows},
        figures={"bridge.png": figure},
        results=results,
    )


def _draw_bridge(found: Mapping[str, BridgeStates], path: Path) -> Path:
    panels = {
        "P(bridge) after the step": "probability",
        "cosine: state, embedding of the bridge": "cosine",
        "cosine: next step's input, embedding": "entering",
    }

    def draw(axes: Axes, panel: str) -> None:
        for name, color in series_colors([*found]).items():
            values = getattr(found[name], panels[panel])
            steps = range(1, len(values) + 1)
            axes.plot(steps, values, color=color, marker="o", label=name)
            axes.set_xticks(steps)
        axes.set_ylim(min(-0.05, axes.get_ylim()[0]), 1.05)
        axes.set_xlabel("recurrent step")

    name, states = list(found.items())[-1]
    said = f"{name}: after one step the head gives the bridge {states.probability[0]:.2f}"
    title = f"{said}, and the state's cosine to its embedding is {states.cosine[0]:.2f}"
    return draw_panels([*panels], draw, path, title=title)


def analyse_intervention(
    run: Path,
    *,
    strengths: tuple[float, ...] = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0),
    strata: tuple[str, ...] = (),
    recurrent_steps: int | None = None,
    questions: int = 256,
) -> Findings:
    """Replace a state by the embedding of its decoded token, and grade the answers (DiscoLoop).

    For runs on a generated task, whose exam gives the questions. After the first step the state at
    the first waypoint, such as the bridge of two hops, is mixed with the normed embedding of its
    likeliest token. Writes evals/intervention-step-N.json and a plot that `report` shows.

    Args:
        run: Run (its newest checkpoint is taken) or its checkpoints/step-N.
        strengths: Shares of the embedding in the mixture, from 0 to 1.
        strata: Strata of the task's exam; default every stratum whose questions have more than one
            waypoint.
        recurrent_steps: R; default as in training.
        questions: Largest number of different questions of each stratum.
    """
    loaded, task, names = _open(run, strata, questions)
    if (steps := chosen_steps(recurrent_steps, loaded)) < 2:
        raise UserError(f"recurrent_steps={steps} leaves no step behind the first; give at least 2")
    how: Any = {"strengths": strengths, "steps": steps, "count": questions}
    found = {name: intervention(loaded.model, task, name, **how) for name in names}
    rows = [["stratum", *(f"{strength:g}" for strength in strengths)]]
    rows += [[name, *(f"{share:.3f}" for share in shares)] for name, shares in found.items()]
    results = {
        f"{task.name}/{name}/intervention/alpha:{strength:g}": round(share, 5)
        for name, shares in found.items()
        for strength, share in zip(strengths, shares, strict=True)
    }
    figure = Figure(
        "States replaced by embeddings",
        "Share of right answers when the state at the bridge is mixed, after the first step, with "
        "the embedding of the token that it decodes to.",
        partial(_draw_intervention, found, strengths),
    )
    return Findings(
        name="intervention",
        loaded=loaded,
        record={"questions": questions, "strengths": strengths, "accuracy": found},
        tables={"Right answers by share of the embedding": rows},
        figures={"intervention.png": figure},
        results=results,
    )


def _draw_intervention(
    found: Mapping[str, Sequence[float]], strengths: Sequence[float], path: Path
) -> Path:
    def draw(axes: Axes) -> None:
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
