"""Put the embedding of what a state decodes to in its place, between two steps, without training.

    h ← (1 − α) h + α RMSNorm(W[argmax W h])      at one position, after one step

If a model answers more questions with it than without, it had found the token that the position
stands for but could not use the state that says so.

Source: DiscoLoop, arXiv 2607.00341, §3.2 Eq. 3; the norm has no gain.
"""

from collections.abc import Sequence
from pathlib import Path

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX

from titan_loop.data.load.held_out import HeldOutWindows
from titan_loop.data.tasks.task import Task
from titan_loop.errors import UserError, nearest
from titan_loop.evaluation.exam import example_windows
from titan_loop.models.decoder import LoopDecoder
from titan_loop.storage.json_files import count, number, read_json_object
from titan_loop.storage.regular_file import DamagedFileError


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
    """Return the share of questions of a stratum that are right at every strength α.

    Args:
        model: In evaluation mode.
        task: The task that the model was trained on.
        stratum: Name of a stratum, whose questions have the same waypoints.
        strengths: α, each from 0 to 1.
        steps: R.
        count: Number of questions.
        waypoint: The waypoint at whose position the state is replaced; None for the first.
        after: The step after which it is, below R.
        batch_rows: Questions in one forward pass.

    Raises:
        UserError: There is no such waypoint, or no step behind the intervention.
    """
    if not 1 <= after < steps:
        raise UserError(f"after={after} must be at least 1 and below the {steps} recurrent steps")
    for strength in strengths:
        if not 0 <= strength <= 1:
            raise UserError(f"strengths={strength} must be between 0 and 1")
    questions = task.held_out_questions(count, task.strata[stratum])
    known = task.waypoints(questions[0])
    waypoint = waypoint or next(iter(known))
    if waypoint not in known:
        raise UserError(f"waypoint={waypoint}: {stratum} has none{nearest(waypoint, known)}")
    windows = example_windows(
        stratum,
        [task.encode(question) for question in questions],
        task.columns,
        room=model.config.max_seq_len,
    )
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
            agrees_BL = (said_BL == batch.labels) | (batch.labels == IGNORE_INDEX)
            right[index] += agrees_BL.all(dim=1).sum().item()
    return (right / count).tolist()


def _final_state(
    model: LoopDecoder,
    batch: HeldOutWindows,
    where_B: Tensor,
    strength: float,
    steps: int,
    after: int,
) -> Tensor:
    """Return what is read of the last state, (B, L, D), with one state replaced on the way."""
    context = model.make_context(batch.input, batch.positions, columns=batch.columns or None)
    carry = model.start(batch.input, context)
    row_B = torch.arange(len(where_B), device=where_B.device)
    hidden_BLD = model.step(carry, 1, context)
    for step in range(1, steps):
        if step == after:
            said_BL = model.readout(model.read(hidden_BLD, context)).argmax(dim=-1)
            token_BD = model.tok_embeddings(said_BL[row_B, where_B].unsqueeze(1))[:, 0]
            token_BD = F.rms_norm(token_BD, token_BD.shape[-1:]).to(hidden_BLD.dtype)
            hidden_BLD = hidden_BLD.clone()
            kept_BD = (1 - strength) * hidden_BLD[row_B, where_B]
            hidden_BLD[row_B, where_B] = kept_BD + strength * token_BD
        carry = model.advance(carry, hidden_BLD, step, context)
        hidden_BLD = model.step(carry, step + 1, context)
    return model.read(hidden_BLD, context)


def read_intervention(path: Path) -> tuple[int, dict[str, float]]:
    """Return the step and TASK/STRATUM/intervention/alpha:α → accuracy of a saved analysis.

    Older records do not name their task; they count for nothing.

    Raises:
        UserError: The file is damaged.
    """
    fix = "write it anew: titan-loop analyse intervention RUN"
    record = read_json_object(path, fix=fix)
    if "task" not in record:
        return 0, {}
    try:
        return count(record["step"]), {
            f"{record['task']}/{stratum}/intervention/alpha:{number(strength):g}": round(
                number(share), 5
            )
            for stratum, shares in record["accuracy"].items()
            for strength, share in zip(record["strengths"], shares, strict=True)
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(path, repr(error), fix) from error
