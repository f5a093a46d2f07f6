"""The bridge of a question in the state: its probability, and the angle to its embedding.

    P_r = softmax(W norm(h_r))_b     c_r = cos(h_r, W[b])     e_r = cos(input of step r + 1, W[b])

at the bridge b of each question, after every step r. In a plain loop the next step starts from h_r,
so e_r = c_r. DiscoLoop adds the embedding of decoded tokens first, so e_r shows its channel's work.
A bridge that is decoded but lies far from its embedding asks the next step to look up a fact in a
form that training has never shown it. h_r is the state that the next step receives: where the norm
stands at the readout alone, it has not been normed.

Source: DiscoLoop, arXiv 2607.00341, §3.2 and Table 1(b), which has P_1 and c_1 of the plain loop.
Deviation: each question counts once; e_r is ours.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_loop.analysis.drawing import draw_panels, series_colors
from titan_loop.analysis.steps.findings import Figure, Findings, chosen_steps, open_task
from titan_loop.data.tasks.task import Task
from titan_loop.errors import UserError
from titan_loop.evaluation.exam import question_windows
from titan_loop.models.decoder import LoopDecoder

from .intervention import different_questions, several_waypoints

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    """Return the readings of the first waypoint of at most `count` different questions.

    Args:
        task: The task that the model was trained on.
        stratum: Name of a stratum, whose questions have the same waypoints.
        steps: R.
    """
    questions = different_questions(task, stratum, count)
    windows = question_windows(model, task, stratum, questions)
    device = model.tok_embeddings.weight.device
    first = [next(iter(task.waypoints(question).values())) for question in questions]
    at = torch.tensor(first, device=device)
    sums = np.zeros((3, steps))
    for start in range(0, len(questions), _BATCH_ROWS):
        rows = range(start, min(start + _BATCH_ROWS, len(questions)))
        batch = windows.rows(rows, device)
        position_B, token_B = at[start : rows.stop].unbind(-1)
        where = torch.arange(len(token_B), device=device), position_B
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
    probability, cosine, entering = sums / len(questions)
    return BridgeStates(probability, cosine, entering[:-1])


def _cosines(model: LoopDecoder, state_BD: Tensor, token_B: Tensor) -> float:
    """Return the sum over B of the cosines of states to tokens' embeddings."""
    embedding_BD = model.tok_embeddings(token_B.unsqueeze(1))[:, 0]
    return F.cosine_similarity(state_BD.float(), embedding_BD.float(), dim=-1).sum().item()


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
    loaded, task, names = open_task(run, strata, questions)
    names = names if strata else several_waypoints(task, names)
    if not names:
        raise UserError(f"{task.name} asks nothing by a bridge; name its strata with --strata")
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
        partial(_draw, found),
    )
    return Findings(
        name="bridge",
        loaded=loaded,
        record={"questions": questions, "recurrent_steps": steps},
        tables={"The bridge at its position": rows},
        figures={"bridge.png": figure},
        results=results,
    )


def _draw(found: Mapping[str, BridgeStates], path: Path) -> Path:
    panels = {
        "P(bridge) after the step": "probability",
        "cosine: state, embedding of the bridge": "cosine",
        "cosine: next step's input, embedding": "entering",
    }

    def draw(axes: "Axes", panel: str) -> None:
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
