"""Agreement of recurrent steps: the number of items on which two of them give the same answer.

    A[i, j] = number of items on which steps i and j give the same answer

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §7 (1,000 Quora pairs).
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from titan_loop.analysis.drawing import draw_axes
from titan_loop.analysis.steps.findings import Figure, Findings
from titan_loop.tables import columns

from .items import ITEMS, item_nats, open_items

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def agreement(nats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return every step's answers, and the number of items on which two steps agree.

    Args:
        nats: Shape (items, steps, choices).

    Returns:
        (items, steps) indices of the most likely choices, and the symmetric (steps, steps) counts,
        whose diagonal is the number of items.
    """
    answers = nats.argmin(axis=-1)
    same = answers[:, :, None] == answers[:, None, :]
    return answers, same.sum(axis=0)


def analyse_agreement(
    run: Path, *, items: str = ITEMS, depths: tuple[int, ...] = (), limit: int | None = None
) -> Findings:
    """Count the items on which two recurrent steps give the same answer.

    Writes evals/agreement-step-N.json with every item's answer after every step, and a plot that
    `report` shows.

    Args:
        run: Run (its newest checkpoint is taken) or its checkpoints/step-N.
        items: mmlu_dev, multi_hop, mano, or a JSONL file with text, choices and answer.
        depths: Recurrent steps; default 1 to the trained R.
        limit: Number of items to use, from the first.
    """
    loaded, chosen = open_items(run, items, limit)
    steps = list(depths) or list(range(1, loaded.recurrent_steps + 1))
    answers, matrix = agreement(item_nats(loaded, chosen, steps))
    rows = [["same answer", *(f"step {step}" for step in steps)]]
    for step, counts in zip(steps, matrix.tolist(), strict=True):
        rows.append([f"step {step}", *map(str, counts)])
    lines = columns(rows)
    if all(item.answer is not None for item in chosen):
        right = [[item.answer == a for a in row] for item, row in zip(chosen, answers, strict=True)]
        shares = (f"{sum(column) / len(chosen):.3f}" for column in zip(*right, strict=True))
        lines.append(f"right of {len(chosen)}: {', '.join(shares)}")
    record = {
        "items": items,
        "depths": steps,
        "agreement": matrix.tolist(),
        "answers": answers.tolist(),
        "right_answers": [item.answer for item in chosen],
    }
    figure = Figure(
        "Agreement of steps",
        "Share of the items that two steps answer alike.",
        partial(_draw, matrix, steps),
    )
    return Findings(
        name="agreement",
        loaded=loaded,
        record=record,
        lines=lines,
        figures={"agreement.png": figure},
    )


def _draw(matrix: np.ndarray, depths: Sequence[int], path: Path) -> Path:
    def draw(axes: "Axes") -> None:
        shares = matrix / matrix[0, 0]
        axes.imshow(shares, vmin=0, vmax=1, cmap="viridis")
        for (row, column), share in np.ndenumerate(shares):
            color = "white" if share < 0.6 else "black"
            axes.text(column, row, f"{share:.2f}", ha="center", va="center", color=color)
        axes.set_xticks(range(len(depths)), [str(depth) for depth in depths])
        axes.set_yticks(range(len(depths)), [str(depth) for depth in depths])
        axes.grid(visible=False)
        axes.set_xlabel("recurrent step")
        axes.set_ylabel("recurrent step")

    title = (
        f"Steps {depths[0]} and {depths[-1]} answer {matrix[0, -1]} of {matrix[0, 0]} items alike"
    )
    return draw_axes(draw, path, title=title)
