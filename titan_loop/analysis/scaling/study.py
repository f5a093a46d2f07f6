"""The fits and hold-outs of a scaling study.

    ScalingData ─► fits of the total loss in three forms; held-out error chooses one
                ├► Ouro's additive fit of the total loss ─► hold-outs by size, tokens and R
                ├► a fit of the step-wise losses for each R trained with, and its hold-outs
                └► composition: Σ_r p_r L_step(N, D, r) against the total loss at the same R

A form is judged on points it was not fitted to: the largest width, the second half of the tokens
and the largest R, each held out by itself. R² of Ouro's hold-outs is over all points.

Sources: Zhu et al. 2025 (Ouro), arXiv 2510.25741, Appendix E.1: ten choices of three of five sizes.
Chen et al. 2026, arXiv 2609.40316: held-out error by R, N and D.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from titan_loop.analysis.scaling.data import ScalingData
from titan_loop.analysis.scaling.fit import Fit, bootstrap, fit
from titan_loop.analysis.scaling.law import ADDITIVE, DENSE, SPARSE, Law, Losses, with_repeats
from titan_loop.errors import UserError
from titan_loop.tables import columns

FORMAT_VERSION = 3
HELD_OUT_SHARE = 0.4
"""Share of sizes that a hold-out by size leaves out: two of the paper's five. At least two stay."""

FIRST_TOKENS = (0.25, 0.5, 0.75)
_MOST_SUBSETS = 10
_SAME_SIZE = 0.01
"""Where widths are unknown, parameter counts that differ by a smaller share count as one size. An
exit gate, which runs at R = 1 lack, adds D + 1 parameters: a held-out width must not stay in the
fit without its gate.
"""

_FORMS_DIFFER = 3
"""Values of R that tell the forms apart: with two of them, one curve fits all."""

_TIE = 0.05
"""Relative difference of held-out errors below which the form with fewer coefficients is chosen."""


@dataclass(frozen=True)
class HoldOut:
    """Fits of part of the points.

    Attributes:
        kind: Fitted part, such as "3 of 5 sizes".
        r_squared: Over all points, one for each fit.
        rmse: Over the held-out points, in nats, one for each fit.
    """

    kind: str
    r_squared: tuple[float, ...]
    rmse: tuple[float, ...]


@dataclass(frozen=True)
class FittedLaw:
    """A law, the points it was fitted to, and its errors on points it did not see.

    Attributes:
        name: The fitted loss, such as "total loss".
        remarks: Caveats, such as coefficients that the points leave open.
        chosen: Whether held-out error prefers this form of the total loss.
    """

    name: str
    fit: Fit
    points: Losses
    hold_outs: tuple[HoldOut, ...]
    remarks: tuple[str, ...]
    chosen: bool = False

    @property
    def held_out_error(self) -> float:
        """Root mean square of the errors of all hold-outs, in nats; NaN without any."""
        errors = [error for hold_out in self.hold_outs for error in hold_out.rmse]
        return math.sqrt(np.mean(np.square(errors))) if errors else math.nan


@dataclass(frozen=True)
class Composition:
    """R trained with, mean exit distribution, and R² of Σ_r p_r L_step(N, D, r) as total loss."""

    steps: int
    exit_pmf: tuple[float, ...]
    r_squared: float


@dataclass(frozen=True)
class ScalingStudy:
    """All fits of one set of losses; `rising` counts the step-wise series that were left out."""

    laws: tuple[FittedLaw, ...]
    compositions: tuple[Composition, ...]
    rising: int

    def as_record(self, source: str) -> dict[str, Any]:
        """Return the content of `scaling.json`; `source` names the fitted runs or table."""
        return {
            "format_version": FORMAT_VERSION,
            "laws": [
                {
                    "name": law.name,
                    "form": law.fit.law.name,
                    "chosen": law.chosen,
                    "source": source,
                    "formula": law.fit.law.formula,
                    "points": len(law.points),
                    "range": _ranges(law.points),
                    "coefficients": dict(law.fit.values),
                    "intervals": {name: list(v) for name, v in law.fit.intervals.items()},
                    "rmse": law.fit.rmse,
                    "r_squared": law.fit.r_squared(law.points),
                    "hold_outs": {h.kind: list(h.r_squared) for h in law.hold_outs},
                    "held_out_rmse": {h.kind: list(h.rmse) for h in law.hold_outs},
                    "remarks": list(law.remarks),
                }
                for law in self.laws
            ],
            "compositions": [
                {"recurrent_steps": c.steps, "exit_pmf": list(c.exit_pmf), "r_squared": c.r_squared}
                for c in self.compositions
            ],
            "rising_series_left_out": self.rising,
        }


def _ranges(points: Losses) -> dict[str, list[float]]:
    named = {"parameters": points.parameters, "tokens": points.tokens}
    named |= {"recurrent_steps": points.steps, "experts": points.experts}
    return {name: [float(x.min()), float(x.max())] for name, x in named.items()}


def study(
    data: ScalingData, *, samples: int, seed: int = 0, exit_pmf: Sequence[float] = ()
) -> ScalingStudy:
    """Fit everything the points allow; raise `UserError` if they determine no law.

    Args:
        samples: Number of bootstrap resamplings behind each interval; 0 gives none.
        exit_pmf: Mean exit distribution of the runs that trained with R = len(exit_pmf); overrides
            the runs' logs.
    """
    additive, forms = ADDITIVE, SPARSE if len(np.unique(data.total.experts)) > 1 else DENSE
    if np.any(data.total.unique < data.total.tokens):
        additive = with_repeats(additive)
        forms = {name: with_repeats(law) for name, law in forms.items()}
    _require(data.total, [additive, *forms.values()])
    pmfs = dict(data.exit_pmf)
    if exit_pmf:
        _require_distribution(exit_pmf, data)
        pmfs[len(exit_pmf)] = np.array(exit_pmf)
    laws = [
        _fitted("total loss", additive, data.total, samples, seed),
        *_chosen(_fitted_forms(forms, data.total, samples, seed)),
    ]
    compositions = []
    for steps, points in data.by_step.items():
        if len(points) < len(additive.coefficients) or len(np.unique(points.steps)) < 2:
            continue
        laws.append(_fitted(f"steps of R = {steps}", additive, points, samples, seed))
        total = data.total[data.total.steps == steps]
        if steps in pmfs and len(total) > 1:
            pmf = pmfs[steps]
            score = _composed(laws[-1].fit, pmf, total)
            compositions.append(Composition(steps, tuple(map(float, pmf)), score))
    return ScalingStudy(tuple(laws), tuple(compositions), data.rising)


def _require_distribution(exit_pmf: Sequence[float], data: ScalingData) -> None:
    if min(exit_pmf) < 0 or not math.isclose(sum(exit_pmf), 1, abs_tol=1e-3):
        raise UserError(
            f"exit_pmf={tuple(exit_pmf)} sums to {sum(exit_pmf):g}; give the "
            "probabilities of leaving after each step; they sum to 1"
        )
    if len(exit_pmf) not in data.by_step:
        raise UserError(
            f"exit_pmf has {len(exit_pmf)} entries, but no step-wise losses of runs trained with "
            f"R = {len(exit_pmf)} were given"
        )


def _fitted(name: str, law: Law, points: Losses, samples: int, seed: int) -> FittedLaw:
    whole = bootstrap(fit(law, points, seed=seed), points, samples=samples, seed=seed)
    hold_outs = _hold_outs(law, points, _paper_parts(points, seed), seed)
    return FittedLaw(name, whole, points, tuple(hold_outs), tuple(_open_coefficients(points)))


def _fitted_forms(
    forms: Mapping[str, Law], points: Losses, samples: int, seed: int
) -> list[FittedLaw]:
    """Fit every form to the same parts of the points: those that determine each form."""
    most = max(len(law.coefficients) for law in forms.values())
    parts = [(kind, mask) for kind, mask in _largest(points) if most <= mask.sum() < len(points)]
    remarks = [] if parts else ["there are too few points to hold any out, so no form is chosen"]
    count = len(np.unique(points.steps))
    if count < _FORMS_DIFFER:
        remarks.append(
            f"{count} values of R do not tell the forms apart, so none is chosen; add runs at a "
            "third R"
        )
    elif count == _FORMS_DIFFER:
        remarks.append("the largest R is not held out: the two others do not tell the forms apart")
    found: list[FittedLaw] = []
    for name, law in forms.items():
        whole = bootstrap(fit(law, points, seed=seed), points, samples=samples, seed=seed)
        held = _hold_outs(law, points, [(kind, [mask]) for kind, mask in parts], seed)
        name = f"worth of a step, {name}"
        found.append(FittedLaw(name, whole, points, tuple(held), tuple(remarks)))
    return found


def _chosen(laws: Sequence[FittedLaw]) -> list[FittedLaw]:
    """Mark the form with the least held-out error; ties go to the one with fewest coefficients."""
    steps = np.unique(laws[0].points.steps)
    if len(steps) < _FORMS_DIFFER or not laws[0].hold_outs:
        return list(laws)
    least = min(law.held_out_error for law in laws)
    close = [law for law in laws if law.held_out_error <= (1 + _TIE) * least]
    best = min(close, key=lambda law: (len(law.fit.law.coefficients), law.held_out_error))
    return [replace(law, chosen=law is best) for law in laws]


def _require(points: Losses, laws: Sequence[Law]) -> None:
    law = max(laws, key=lambda law: len(law.coefficients))
    needed = len(law.coefficients)
    if len(points) < needed:
        raise UserError(
            f"{len(points)} total losses are fewer than the {needed} coefficients of "
            f"{law.formula}; give more runs or more points of each"
        )
    for name, values, given in (
        ("sizes", sizes_of(points), points.parameters),
        ("numbers of tokens", points.tokens, points.tokens),
        ("values of R", points.steps, points.steps),
    ):
        if len(np.unique(values)) < 2:
            raise UserError(
                f"a law needs at least two {name}, and all points have {given[0]:g}; add others"
            )


def _open_coefficients(points: Losses) -> list[str]:
    """Name the coefficients that the points leave open even where they determine the curve."""
    remarks = []
    for values, name, open_ones in (
        (sizes_of(points), "sizes", "E, A, alpha and t1"),
        (points.tokens, "numbers of tokens", "E, B, beta and t2"),
        (points.steps, "values of R", "E, C, gamma and t3"),
    ):
        if (count := len(np.unique(values))) < 4:
            remarks.append(
                f"{count} {name} do not determine {open_ones} individually; trust the predictions "
                "between them, not these coefficients"
            )
    return remarks


def sizes_of(points: Losses) -> np.ndarray:
    """Return the rank of each point's size, 0 for the smallest width, shape (n,)."""
    distinct, place = np.unique(points.width, return_inverse=True)
    is_next = np.diff(distinct, prepend=distinct[0]) > _SAME_SIZE * distinct
    return np.cumsum(is_next)[place]


def _subsets(count: int, kept: int, seed: int) -> list[tuple[int, ...]]:
    """Return all choices of `kept` of `count` sizes, or ten random ones if there are more."""
    if math.comb(count, kept) <= _MOST_SUBSETS:
        return list(itertools.combinations(range(count), kept))
    generator = np.random.default_rng(seed)
    chosen: set[tuple[int, ...]] = set()
    while len(chosen) < _MOST_SUBSETS:
        chosen.add(tuple(sorted(generator.choice(count, kept, replace=False).tolist())))
    return sorted(chosen)


_Part = tuple[str, list[np.ndarray]]
"""Kind of a hold-out, and a mask of the fitted points for each of its fits."""


def _paper_parts(points: Losses, seed: int) -> list[_Part]:
    size, steps = sizes_of(points), np.unique(points.steps)
    sizes = int(size.max()) + 1
    parts: list[_Part] = []
    if (kept := max(2, sizes - math.ceil(HELD_OUT_SHARE * sizes))) < sizes:
        subsets = _subsets(sizes, kept, seed)
        parts.append((f"{kept} of {sizes} sizes", [np.isin(size, subset) for subset in subsets]))
    last = points.tokens.max()
    for share in FIRST_TOKENS:
        parts.append((f"first {share:.0%} of the tokens", [points.tokens <= share * last]))
    if len(steps) >= 3:
        kind = f"{len(steps) - 1} of {len(steps)} values of R"
        parts.append((kind, [points.steps != each for each in steps]))
    return parts


def _largest(points: Losses) -> list[tuple[str, np.ndarray]]:
    """Hold out the largest size, token counts and R, each by itself, where enough others stay."""
    size = sizes_of(points)
    parts: list[tuple[str, np.ndarray]] = []
    if size.max() > 1:
        parts.append(("all but the largest size", size < size.max()))
    middle = (points.tokens.min() + points.tokens.max()) / 2
    parts.append(("first half of the tokens", points.tokens <= middle))
    if len(np.unique(points.steps)) > _FORMS_DIFFER:  # the rest still tells the forms apart
        parts.append(("all but the largest R", points.steps < points.steps.max()))
    return parts


def _hold_outs(law: Law, points: Losses, parts: Sequence[_Part], seed: int) -> list[HoldOut]:
    found: list[HoldOut] = []
    for kind, masks in parts:
        usable = [mask for mask in masks if len(law.coefficients) <= mask.sum() < len(points)]
        if fits := [fit(law, points[mask], seed=seed, starts=2) for mask in usable]:
            r_squared = tuple(each.r_squared(points) for each in fits)
            pairs = zip(fits, usable, strict=True)
            rmse = tuple(each.error(points[~mask]) for each, mask in pairs)
            found.append(HoldOut(kind, r_squared, rmse))
    return found


def _composed(step_fit: Fit, pmf: np.ndarray, total: Losses) -> float:
    predicted = np.zeros(len(total))
    for step, probability in enumerate(pmf, start=1):
        at_step = replace(total, steps=np.full(len(total), float(step)))
        predicted += probability * step_fit.predict(at_step)
    spread = np.sum((total.loss - total.loss.mean()) ** 2)
    return float(1 - np.sum((total.loss - predicted) ** 2) / spread)


def study_lines(result: ScalingStudy) -> list[str]:
    """Return the study as lines of text."""
    text: list[str] = []
    for law in result.laws:
        text += [
            f"{law.name}: {law.fit.law.formula}" + "  (chosen)" * law.chosen,
            f"  {len(law.points)} points, R2 {law.fit.r_squared(law.points):.4f}, "
            f"residual {law.fit.rmse:.4f} nats",
        ]
        rows = [
            [f"  {name}", f"{value:.4g}", _interval(law.fit.intervals, name)]
            for name, value in law.fit.values.items()
        ]
        text += columns(rows)
        for hold_out in law.hold_outs:
            text.append(
                f"  fitted to {hold_out.kind}: held-out error {np.mean(hold_out.rmse):.4f} nats, "
                f"R2 over all points {np.mean(hold_out.r_squared):.4f}"
                + (f" (means of {len(hold_out.rmse)})" if len(hold_out.rmse) > 1 else "")
            )
        text += [f"  note: {remark}" for remark in law.remarks] + [""]
    for composed in result.compositions:
        pmf = ", ".join(f"{p:.4f}" for p in composed.exit_pmf)
        text.append(
            f"total loss at R = {composed.steps} from the steps' losses and the exit "
            f"distribution {{{pmf}}}: R2 {composed.r_squared:.4f}"
        )
    if result.rising:
        text.append(f"left out: {result.rising} step-wise series that rise with tokens")
    return text


def _interval(intervals: Mapping[str, tuple[float, float]], name: str) -> str:
    if name not in intervals:
        return ""
    low, high = intervals[name]
    return f"[{low:.4g}, {high:.4g}]"
