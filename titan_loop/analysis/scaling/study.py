"""The fits and hold-outs of a scaling study.

    losses ─► fits in three forms; held-out error chooses one ─► scaling.json, iso_flop.png

A form is judged on points it was not fitted to: the largest width, the second half of the tokens
and the largest R, each held out by itself.

Source: Chen et al. 2026, arXiv 2609.40316: held-out error by R, N and D.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from titan_loop.analysis.drawing import Axes, depth_colors, draw_panels
from titan_loop.analysis.scaling.fit import Fit, bootstrap, fit
from titan_loop.analysis.scaling.law import LAWS, Losses
from titan_loop.errors import UserError
from titan_loop.storage.json_files import write_json
from titan_loop.tables import columns, short

FORMAT_VERSION = 3
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
class FittedLaw:
    """A law, the points it was fitted to, and its errors on points it did not see.

    Attributes:
        held_out: Fitted part → root mean square error on the others, in nats.
        remark: Caveat, such as a choice that the points leave open.
        chosen: Whether held-out error prefers this form.
    """

    fit: Fit
    points: Losses
    held_out: Mapping[str, float]
    remark: str
    chosen: bool = False

    @property
    def held_out_error(self) -> float:
        """Root mean square of the errors of all hold-outs, in nats."""
        return math.sqrt(np.mean(np.square([*self.held_out.values()])))

    def as_record(self, source: str) -> dict[str, Any]:
        """Return the law's record in `scaling.json`; `source` names the fitted runs or table."""
        points = self.points
        named = {"parameters": points.parameters, "tokens": points.tokens}
        named["recurrent_steps"] = points.steps
        return {
            "form": self.fit.law.name,
            "chosen": self.chosen,
            "source": source,
            "formula": self.fit.law.formula,
            "points": len(points),
            "range": {name: [float(x.min()), float(x.max())] for name, x in named.items()},
            "coefficients": dict(self.fit.values),
            "intervals": {name: list(pair) for name, pair in self.fit.intervals.items()},
            "rmse": self.fit.error(points),
            "r_squared": self.fit.r_squared(points),
            "held_out_rmse": dict(self.held_out),
            "remark": self.remark,
        }

    def lines(self) -> list[str]:
        """Return the law as lines of text."""
        rows = []
        for name, value in self.fit.values.items():
            low, high = self.fit.intervals.get(name, (math.nan, math.nan))
            bounds = "" if math.isnan(low) else f"[{low:.4g}, {high:.4g}]"
            rows.append([f"  {name}", f"{value:.4g}", bounds])
        return [
            f"{self.fit.law.name}: {self.fit.law.formula}" + "  (chosen)" * self.chosen,
            f"  {len(self.points)} points, R2 {self.fit.r_squared(self.points):.4f}, "
            f"residual {self.fit.error(self.points):.4f} nats",
            *columns(rows),
            *(
                f"  fitted to {kind}: held-out error {e:.4f} nats"
                for kind, e in self.held_out.items()
            ),
            *([f"  note: {self.remark}"] if self.remark else []),
            "",
        ]


def study(points: Losses, *, samples: int, seed: int = 0) -> list[FittedLaw]:
    """Fit every form; raise `UserError` if the points determine no law.

    The form with the least held-out error is chosen; ties go to the one with fewest coefficients.

    Args:
        samples: Number of bootstrap resamplings behind each interval; 0 gives none.
    """
    # All forms are compared on the same parts: those that determine each form.
    most = max(len(law.coefficients) for law in LAWS.values())
    _require(points, most)
    parts = {kind: mask for kind, mask in _parts(points) if most <= mask.sum() < len(points)}
    steps, remark = len(np.unique(points.steps)), ""
    if not parts:
        remark = "there are too few points to hold any out, so no form is chosen"
    elif steps < _FORMS_DIFFER:
        remark = f"{steps} values of R do not tell the forms apart, so none is chosen"
    elif steps == _FORMS_DIFFER:
        remark = "the largest R is not held out: the two others do not tell the forms apart"
    laws = []
    for law in LAWS.values():
        whole = bootstrap(fit(law, points, seed=seed), points, samples=samples, seed=seed)
        held = {
            kind: fit(law, points[mask], seed=seed, starts=2).error(points[~mask])
            for kind, mask in parts.items()
        }
        laws.append(FittedLaw(whole, points, held, remark))
    if steps < _FORMS_DIFFER or not parts:
        return laws
    least = min(law.held_out_error for law in laws)
    close = [law for law in laws if law.held_out_error <= (1 + _TIE) * least]
    best = min(close, key=lambda law: (len(law.fit.law.coefficients), law.held_out_error))
    return [replace(law, chosen=law is best) for law in laws]


def _require(points: Losses, coefficients: int) -> None:
    if len(points) < coefficients:
        raise UserError(
            f"{len(points)} losses are fewer than the {coefficients} coefficients of a law; give "
            "more runs or more points of each"
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


def sizes_of(points: Losses) -> np.ndarray:
    """Return the rank of each point's size, 0 for the smallest width, shape (n,)."""
    distinct, place = np.unique(points.width, return_inverse=True)
    is_next = np.diff(distinct, prepend=distinct[0]) > _SAME_SIZE * distinct
    return np.cumsum(is_next)[place]


def _parts(points: Losses) -> list[tuple[str, np.ndarray]]:
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


def write_study(laws: Sequence[FittedLaw], folder: Path, *, source: str) -> list[Path]:
    """Write `scaling.json` and the plot of the chosen law; return the paths."""
    path = folder / "scaling.json"
    record = {"format_version": FORMAT_VERSION, "laws": [law.as_record(source) for law in laws]}
    write_json(path, record)
    return [path, *(_draw_iso_flop(law, folder / "iso_flop.png") for law in laws if law.chosen)]


def _draw_iso_flop(law: FittedLaw, path: Path) -> Path:
    """Draw the law at three training budgets; dots are measured within 20 % of the budget.

    Training costs 6 FLOPs per token and visited parameter: more steps leave fewer tokens.
    """
    points = law.points
    steps = np.unique(points.steps)
    share = float(np.mean(points.looped / points.parameters))
    spent = 6 * (points.parameters + points.looped * (points.steps - 1)) * points.tokens
    budgets = {f"{flops:.1e} FLOPs": flops for flops in np.quantile(spent, (0.5, 0.75, 1.0))}
    sizes = np.geomspace(points.parameters.min(), points.parameters.max(), 40)

    def draw(axes: Axes, name: str) -> None:
        for step, color in zip(steps, depth_colors(len(steps)), strict=True):
            tokens = budgets[name] / (6 * sizes * (1 + share * (step - 1)))
            at = {"parameters": sizes, "looped": share * sizes, "tokens": tokens}
            at |= dict.fromkeys(("steps", "loss", "run", "width"), np.full(len(sizes), step))
            axes.plot(sizes, law.fit.predict(Losses(**at)), color=color, label=f"R = {step:g}")
            near = (points.steps == step) & (np.abs(np.log(spent / budgets[name])) < np.log(1.2))
            axes.plot(points.parameters[near], points.loss[near], "o", color=color, markersize=3)
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xticks(sizes[::13], [short(size) for size in sizes[::13]])
        axes.set_xlabel("parameters")

    title = f"By {law.fit.law.formula}, at equal training FLOPs"
    return draw_panels(list(budgets), draw, path, title=title, label="nats per token")
