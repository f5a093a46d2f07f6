"""Principal components of the last token's state after every recurrent step."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_loop.analysis.drawing import draw_panels, series_colors
from titan_loop.analysis.steps.findings import Figure, Findings

from .items import ITEMS, item_states, open_items

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def principal_components(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the states of all steps on their first two principal components.

    Args:
        states: Shape (items, R, D), of one layer.

    Returns:
        Shape (items, R, 2), and the (2,) shares of the variance; all steps share the two axes.
    """
    flat = states.reshape(-1, states.shape[-1]).astype(np.float64)
    centred = flat - flat.mean(axis=0)
    _, singular, axes = np.linalg.svd(centred, full_matrices=False)
    shares = singular[:2] ** 2 / np.sum(singular**2)
    return (centred @ axes[:2].T).reshape(*states.shape[:2], 2), shares


def analyse_components(
    run: Path, *, items: str = ITEMS, recurrent_steps: int | None = None, limit: int | None = None
) -> Findings:
    """Draw the last prompt token's state after every step on two principal components.

    Args:
        run: Run (its newest checkpoint is taken) or its checkpoints/step-N.
        items: mmlu_dev, multi_hop, mano, or a JSONL file with text, choices and answer; items are
            coloured by their right answer.
        recurrent_steps: R; default as in training.
        limit: Number of items to use, from the first.
    """
    loaded, chosen = open_items(run, items, limit)
    steps = recurrent_steps or loaded.recurrent_steps
    points, shares = principal_components(item_states(loaded, chosen, steps)[:, :, -1])
    kinds = np.array([-1 if item.answer is None else item.answer for item in chosen])
    record = {
        "items": items,
        "variance": shares.tolist(),
        "points": points.tolist(),
        "right_answers": [item.answer for item in chosen],
    }
    figure = Figure(
        "States of the last token",
        "After every step, on two principal components common to all steps; one colour per answer.",
        partial(_draw, points, kinds, shares),
    )
    return Findings(name="pca", loaded=loaded, record=record, figures={"pca.png": figure})


def _draw(points: np.ndarray, kinds: np.ndarray, shares: np.ndarray, path: Path) -> Path:
    names = {f"after step {step + 1}": step for step in range(points.shape[1])}
    colors: Any = series_colors([*np.unique(kinds)])

    def draw(axes: "Axes", name: str) -> None:
        for kind, color in colors.items():
            chosen = points[kinds == kind, names[name]]
            axes.plot(*chosen.T, "o", color=color, markersize=3)
            axes.plot(*chosen.mean(axis=0), color=color, label=f"answer {kind}")  # a label
        axes.set_xlabel("first component")

    title = f"Two components explain {shares[:2].sum():.0%} of the variance of all steps' states"
    return draw_panels(list(names), draw, path, title=title, label="second component")
