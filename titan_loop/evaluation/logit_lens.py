"""Logit lens: what the head would say of the state after every layer of every recurrent step.

    question ─► states at its waypoints ─► final norm, head ─► right? margin, by step and layer

A waypoint is a position and the token that a model has to know there: of a question of two hops the
bridge at the first relation and the target at the second.

Source: recurrent-depth transformers, arXiv 2604.07822, §5.2 and Figure 4.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from titan_loop.data.load.held_out import HeldOutWindows
from titan_loop.data.tasks.task import Task
from titan_loop.evaluation.exam import example_windows
from titan_loop.evaluation.layer_states import at_layer_visits
from titan_loop.models.decoder import LoopDecoder


@dataclass(frozen=True)
class Lens:
    """What is read of one waypoint of the questions of a stratum.

    Attributes:
        stratum: Name of the stratum.
        waypoint: Name of the waypoint.
        accuracy: Share of questions whose waypoint is the likeliest token, (R, layers).
        margin: Mean logit of the waypoint over that of the strongest other token, (R, layers).
    """

    stratum: str
    waypoint: str
    accuracy: np.ndarray
    margin: np.ndarray


@torch.no_grad()
def logit_lens(
    model: LoopDecoder,
    task: Task,
    stratum: str,
    *,
    steps: int,
    count: int,
    batch_rows: int = 64,
) -> list[Lens]:
    """Return what is read of every waypoint of a stratum's exam.

    Args:
        model: In evaluation mode.
        task: The task that the model was trained on.
        stratum: Name of a stratum, whose questions have the same waypoints.
        steps: R.
        count: Number of questions.
        batch_rows: Questions in one forward pass.
    """
    device = model.tok_embeddings.weight.device
    questions = task.held_out_questions(count, task.strata[stratum])
    windows = example_windows(
        stratum,
        [task.encode(q) for q in questions],
        task.columns,
        room=model.config.max_seq_len,
    )
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

    def look(step: int, layer: int, state_BLD: Tensor) -> None:
        logits_BWV = model.readout(model.norm(state_BLD[row_B1, position_BW]))
        visits.append(logit_margin(logits_BWV, token_BW).cpu())

    with at_layer_visits(model, look):
        model(
            batch.input,
            batch.positions,
            recurrent_steps=steps,
            collect="last",
            columns=batch.columns or None,
        )
    return torch.stack(visits, dim=1).unflatten(1, (steps, len(model.looped_layers())))


def logit_margin(logits: Tensor, token: Tensor) -> Tensor:
    """Return the logit of a token over that of the strongest other one, at least fp32.

    Args:
        logits: (…, V).
        token: (…) ids.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    own = wide.gather(-1, token.unsqueeze(-1))
    others = wide.scatter(-1, token.unsqueeze(-1), -torch.inf)
    return own.squeeze(-1) - others.amax(-1)
