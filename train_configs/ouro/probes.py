"""Linear probes that read each step's answer off each layer's states.

    layer l of step i ─► linear classifier ─► the answer of step j

If a late step's answer can be read off the states of an early step, the later steps only rehearse a
decision already taken. Ouro reports that step i's answer can be predicted from the states of step i
alone.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §7 (ROC AUC of linear probes).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from titan_loop.analysis.drawing import COLORS, draw_panels
from titan_loop.analysis.steps.findings import Figure, Findings
from titan_loop.errors import UserError
from titan_loop.tables import columns

from .agreement import agreement
from .items import ITEMS, item_nats, item_states, open_items

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FOLDS = 5
_BOOTSTRAPS = 200


@dataclass(frozen=True)
class ProbeScore:
    """Score of a linear probe that reads one step's answer off one layer's states.

    Attributes:
        state_step: Step of the states, from 1.
        layer: Layer within the step, from 1.
        answer_step: Step whose answer is predicted, from 1.
        auc: Area under the ROC curve on items the probe did not see; with more than two choices,
            the mean of one-against-rest areas.
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

    Items are split into five folds, stratified by answer; each fold is scored by a probe fitted to
    the others. Items whose answer fewer than five items have are left out.

    Args:
        states: float32, shape (items, R, layers, D).
        answers: Shape (items, R), from `agreement`.
        answer_steps: Steps whose answers are predicted, from 1. A step is left out if it gives only
            one answer to five or more items.
        seed: Seed of folds and resamplings.

    Raises:
        UserError: scikit-learn is not installed, or every step answers almost all items alike.
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


def analyse_probes(
    run: Path,
    *,
    items: str = ITEMS,
    recurrent_steps: int | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Findings:
    """Predict each step's answer from the states of every layer and step with linear probes.

    A probe is scored on items it was not fitted to; intervals are bootstrapped over items. Needs
    scikit-learn: pip install 'titan-loop[analyse]'.

    Args:
        run: Run (its newest checkpoint is taken) or its checkpoints/step-N.
        items: mmlu_dev, multi_hop, mano, or a JSONL file with text and choices.
        recurrent_steps: R; default as in training.
        limit: Number of items to use, from the first.
        seed: Seed of folds and resamplings.
    """
    loaded, chosen = open_items(run, items, limit)
    steps = list(range(1, (recurrent_steps or loaded.recurrent_steps) + 1))
    answers, _ = agreement(item_nats(loaded, chosen, steps))
    scores = probe(item_states(loaded, chosen, len(steps)), answers, steps, seed=seed)
    rows = [["answer of", "states of", "layer", "AUC", "95 %"]]
    for score in scores:
        interval = f"{score.low:.3f} to {score.high:.3f}"
        rows.append(
            [
                f"step {score.answer_step}",
                f"step {score.state_step}",
                str(score.layer),
                f"{score.auc:.3f}",
                interval,
            ]
        )
    record = {"items": items, "seed": seed, "probes": [asdict(score) for score in scores]}
    figure = Figure(
        "Answers read off states",
        "Linear probes on each layer of each step; within the orange band states and answer "
        "are of the same step. High values before it mean that later steps only rehearse.",
        partial(_draw, scores),
    )
    return Findings(
        name="probes",
        loaded=loaded,
        record=record,
        lines=columns(rows, left=(0, 1)),
        figures={"probes.png": figure},
    )


def _draw(scores: Sequence[ProbeScore], path: Path) -> Path:
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
        axes.axvspan(panels[name] - 1, panels[name], color=COLORS[4], alpha=0.15)
        axes.set_xlabel("recurrent step of the states (shaded: the answer's step)")
        axes.set_ylim(0.3, 1.02)

    last = max(panels.values())
    early = max((s.auc for s in scores if s.answer_step == last and s.state_step < last), default=0)
    title = (
        f"The answer of step {last} is read off earlier states with an AUC of at most {early:.2f}"
    )
    return draw_panels(list(panels), draw, path, title=title, label="area under the ROC curve")
