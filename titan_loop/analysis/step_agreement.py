"""How answers form over recurrent steps: agreement, linear probes and principal components.

    agreement  A[i, j] = number of items on which steps i and j give the same answer
    probes     layer l of step i ─► linear classifier ─► the answer of step j
    pca        the last token's state after every step, on two principal components

If a late step's answer can be read off the states of an early step, the later steps only rehearse a
decision already taken. Ouro reports that step i's answer is predictable within step i alone.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §7 (1,000 Quora pairs; ROC AUC of linear probes).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_loop.analysis.drawing import depth_colors, draw_axes, draw_panels
from titan_loop.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FOLDS = 5
_BOOTSTRAPS = 200


def agreement(nats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return every step's answers and how often two steps agree.

    Args:
        nats: Shape (items, steps, choices).

    Returns:
        (items, steps) indices of the most likely choices, and the symmetric (steps, steps) counts,
        whose diagonal is the number of items.
    """
    answers = nats.argmin(axis=-1)
    same = answers[:, :, None] == answers[:, None, :]
    return answers, same.sum(axis=0)


@dataclass(frozen=True)
class ProbeScore:
    """How well a linear probe reads one step's answer off one layer's states.

    Attributes:
        state_step: Step of the states, from 1.
        layer: Layer within the step, from 1.
        answer_step: Step whose answer is predicted, from 1.
        auc: Area under the ROC curve on items the probe did not see; one-against-rest, macro, where
            there are several choices.
        low: 2.5 % quantile over resampled items.
        high: 97.5 % quantile.
    """

    state_step: int
    layer: int
    answer_step: int
    auc: float
    low: float
    high: float


def probe(
    states: np.ndarray, answers: np.ndarray, answer_steps: Sequence[int], *, seed: int = 0
) -> list[ProbeScore]:
    """Fit a linear probe for every layer of every step and every answer step.

    Items are split by question into five folds; each is scored by a probe fitted to the others.

    Args:
        states: float32, shape (items, R, layers, D).
        answers: Shape (items, R), from `agreement`.
        answer_steps: Steps whose answers are predicted, from 1. One whose answer is almost always
            the same (fewer than five of a second choice) is left out.
        seed: Chooses folds and resamplings.

    Raises:
        UserError: scikit-learn is not installed, or every step answers all items alike.
    """
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import StratifiedKFold, cross_val_predict
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError as error:
        raise UserError(
            f"probes need scikit-learn ({error}): pip install 'titan-loop[analyse]'"
        ) from error
    scores = []
    for answer_step in answer_steps:
        target = answers[:, answer_step - 1]
        kinds, counts = np.unique(target, return_counts=True)
        kept = np.isin(target, kinds[counts >= _FOLDS])
        if len(np.unique(target[kept])) < 2:
            continue
        folds = StratifiedKFold(_FOLDS, shuffle=True, random_state=seed)
        for state_step in range(1, states.shape[1] + 1):
            for layer in range(1, states.shape[2] + 1):
                features = states[kept, state_step - 1, layer - 1]
                model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000))
                predicted = cross_val_predict(
                    model, features, target[kept], cv=folds, method="predict_proba"
                )
                auc, low, high = _auc(target[kept], np.asarray(predicted), seed)
                scores.append(ProbeScore(state_step, layer, answer_step, auc, low, high))
    if not scores:
        raise UserError(
            "the probes have nothing to predict: every step gives (almost) all items the same "
            "answer; give more items or another checkpoint"
        )
    return scores


def _auc(target: np.ndarray, predicted: np.ndarray, seed: int) -> tuple[float, float, float]:
    """Return the AUC and its 95 % bootstrap interval over items."""
    from sklearn.metrics import roc_auc_score

    kinds = np.unique(target)
    scores = predicted[:, 1] if len(kinds) == 2 else predicted  # scikit-learn's two forms
    random = np.random.default_rng(seed)
    drawn = []
    for _ in range(_BOOTSTRAPS):
        chosen = random.integers(len(target), size=len(target))
        if len(np.unique(target[chosen])) == len(kinds):
            drawn.append(roc_auc_score(target[chosen], scores[chosen], multi_class="ovr"))
    value = float(roc_auc_score(target, scores, multi_class="ovr"))
    return value, float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975))


def principal_components(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the states of all steps on their first two principal components.

    Args:
        states: Shape (items, R, D), of one layer.

    Returns:
        Shape (items, R, 2), and the (2,) shares of the variance; axes are common to all steps.
    """
    flat = states.reshape(-1, states.shape[-1]).astype(np.float64)
    centred = flat - flat.mean(axis=0)
    _, singular, axes = np.linalg.svd(centred, full_matrices=False)
    shares = singular[:2] ** 2 / np.sum(singular**2)
    return (centred @ axes[:2].T).reshape(*states.shape[:2], 2), shares


def draw_agreement(matrix: np.ndarray, depths: Sequence[int], path: Path) -> Path:
    """Draw the matrix of agreement as shares of the items."""

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
        axes.set_title(f"Share of {matrix[0, 0]} items with the same answer")

    return draw_axes(draw, path)


def draw_probes(scores: Sequence[ProbeScore], path: Path) -> Path:
    """Draw the AUC over layers, one panel for each predicted step."""
    panels: Mapping[str, int] = {
        f"answer of step {step}": step for step in sorted({score.answer_step for score in scores})
    }
    layers = max(score.layer for score in scores)

    def draw(axes: "Axes", name: str) -> None:
        chosen = [score for score in scores if score.answer_step == panels[name]]
        at = [(score.state_step - 1) + score.layer / layers for score in chosen]
        axes.fill_between(
            at, [s.low for s in chosen], [s.high for s in chosen], color="0.85", linewidth=0
        )
        axes.plot(at, [score.auc for score in chosen], color="0.2", marker="o", markersize=3)
        axes.axhline(0.5, color="0.6", linewidth=0.8, linestyle="--")
        axes.axvspan(panels[name] - 1, panels[name], color="tab:orange", alpha=0.12)
        axes.set_xlabel("recurrent step of the states (orange: that of the answer)")
        axes.set_ylim(0.3, 1.02)

    title = "Linear probes: area under the ROC curve"
    return draw_panels(list(panels), draw, path, title=title, label="AUC")


def draw_components(points: np.ndarray, kinds: np.ndarray, shares: np.ndarray, path: Path) -> Path:
    """Draw the last token's states, a panel for each step.

    Args:
        points: Shape (items, R, 2).
        kinds: Label of each item, shape (items,).
        shares: The (2,) shares of the variance.
        path: The PNG to write.
    """
    names = {f"after step {step + 1}": step for step in range(points.shape[1])}
    colors: Any = depth_colors(len(np.unique(kinds)))

    def draw(axes: "Axes", name: str) -> None:
        for kind, color in zip(np.unique(kinds), colors, strict=True):
            chosen = points[kinds == kind, names[name]]
            axes.plot(*chosen.T, "o", color=color, markersize=3, label=str(kind))

    title = f"Principal components ({shares[0]:.0%} and {shares[1]:.0%} of the variance)"
    return draw_panels(list(names), draw, path, title=title, legend=True)
