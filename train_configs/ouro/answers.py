"""Answers of recurrent steps: how often two steps agree, and from which states they can be read.

    A[i, j] = number of items on which steps i and j give the same answer
    layer l of step i ─► linear classifier ─► the answer of step j

If a late step's answer can be read off the states of an early step, the later steps only rehearse a
decision already taken. Ouro reports that step i's answer can be predicted from the states of step i
alone.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §7 (1,000 Quora pairs; ROC AUC of linear probes).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titan_loop.analysis.drawing import COLORS, Axes, draw_panels
from titan_loop.analysis.steps.findings import Figure, Findings
from titan_loop.errors import UserError

from .items import Asked

_FOLDS = 5
_BOOTSTRAPS = 200


def agreement(answers: np.ndarray) -> np.ndarray:
    """Return the number of items on which two steps agree.

    Args:
        answers: Indices of choices, (items, steps).

    Returns:
        Symmetric counts, (steps, steps), whose diagonal is the number of items.
    """
    return (answers[:, :, None] == answers[:, None, :]).sum(axis=0)


def analyse_agreement(
    run: Path,
    *,
    items: str = "mmlu_dev",
    depths: tuple[int, ...] = (),
    limit: int | None = None,
) -> Findings:
    """Count the items on which two recurrent steps give the same answer.

    Writes evals/agreement-step-N.json with every item's answer after every step.

    Args:
        run: Run (its newest checkpoint is taken) or its checkpoints/step-N.
        items: mmlu_dev, multi_hop, mano, or a JSONL file with text, choices and answer.
        depths: Recurrent steps; default 1 to the trained R.
        limit: Number of items to use, from the first.
    """
    asked = Asked.of(run, items, limit)
    steps = list(depths) or list(range(1, asked.loaded.recurrent_steps + 1))
    answers = asked.answers(steps)
    matrix = agreement(answers)
    right = [item.answer for item in asked.items]
    rows = [["same answer", *(f"step {step}" for step in steps)]]
    rows += [[f"step {s}", *map(str, c)] for s, c in zip(steps, matrix.tolist(), strict=True)]
    if None not in right:
        shares = (answers == np.array(right)[:, None]).mean(axis=0)
        rows.append(["% right", *(f"{100 * share:.1f}" for share in shares)])
    record = {
        "items": items,
        "depths": steps,
        "agreement": matrix.tolist(),
        "answers": answers.tolist(),
        "right_answers": right,
    }
    tables = {"Items that two steps answer alike": rows}
    return Findings(name="agreement", loaded=asked.loaded, record=record, tables=tables)


class ProbeScore(NamedTuple):
    """Score of a linear probe that reads one step's answer off one layer's states.

    Attributes:
        answer_step: Step whose answer is predicted, from 1.
        state_step: Step of the states, from 1.
        layer: Layer within the step, from 1.
        auc: Area under the ROC curve on items the probe did not see; with more than two choices,
            the mean of one-against-rest areas.
        low: 2.5 % quantile over resampled items.
        high: 97.5 % quantile.
    """

    answer_step: int
    state_step: int
    layer: int
    auc: float
    low: float
    high: float


def probe(states: np.ndarray, answers: np.ndarray, *, seed: int = 0) -> list[ProbeScore]:
    """Fit a linear probe for every layer of every step and every answer step.

    Items are split into five folds, stratified by answer; each fold is scored by a probe fitted to
    the others. Items whose answer fewer than five items have are left out, and so are steps that
    give only one answer to five or more items.

    Args:
        states: float32, shape (items, R, layers, D).
        answers: Shape (items, R).
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
    for answer_step in range(1, answers.shape[1] + 1):
        target = answers[:, answer_step - 1]
        kinds, counts = np.unique(target, return_counts=True)
        kept = np.isin(target, kinds[counts >= _FOLDS])
        if len(np.unique(target[kept])) < 2:
            continue
        folds = StratifiedKFold(_FOLDS, shuffle=True, random_state=seed)
        for state_step, layer in np.ndindex(states.shape[1:3]):
            model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000))
            predicted = cross_val_predict(
                model, states[kept, state_step, layer], target[kept], cv=folds,
                method="predict_proba",
            )  # fmt: skip
            auc = _auc(target[kept], np.asarray(predicted), seed)
            scores.append(ProbeScore(answer_step, state_step + 1, layer + 1, *auc))
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
    items: str = "mmlu_dev",
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
    asked = Asked.of(run, items, limit)
    steps = recurrent_steps or asked.loaded.recurrent_steps
    answers = asked.answers(range(1, steps + 1))
    scores = probe(asked.states(steps), answers, seed=seed)
    rows = [["answer of step", "states of step", "layer", "AUC", "low", "high"]]
    rows += [[*map(str, s[:3]), *(f"{value:.3f}" for value in s[3:])] for s in scores]
    record = {"items": items, "seed": seed, "probes": [score._asdict() for score in scores]}
    figure = Figure(
        "Answers read off states",
        "Linear probes on each layer of each step; within the orange band states and answer "
        "are of the same step. High values before it mean that later steps only rehearse.",
        partial(_draw, scores),
    )
    return Findings(
        name="probes",
        loaded=asked.loaded,
        record=record,
        tables={"Linear probes": rows},
        figures={"probes.png": figure},
    )


def _draw(scores: Sequence[ProbeScore], path: Path) -> Path:
    panels: Mapping[str, int] = {
        f"answer of step {step}": step for step in sorted({score.answer_step for score in scores})
    }
    layers = max(score.layer for score in scores)

    def draw(axes: Axes, name: str) -> None:
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
