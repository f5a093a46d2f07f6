"""Fits of scaling laws: Huber loss on the logarithm of the loss, from the best of many starts.

A fit is a bounded problem in the logarithms of the positive coefficients. Random exponents give the
starts: for given exponents the amplitudes are a linear problem.

Source: Hoffmann et al. 2022, arXiv 2203.15556, Eq. 3 and §3.3 (Huber loss on log L, delta 1e-3).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from titan_loop.analysis.scaling.law import Law, Losses

HUBER_DELTA = 1e-3
"""Largest residual of log L that counts with its square; larger ones count linearly."""

_CANDIDATES = 128
"""Random exponents per fit, of which the best few are refined."""

_TOLERANCE = 1e-12
_EVALUATIONS = 300
"""Steps of a refinement; without noise and with open coefficients it would crawl along a valley."""


@dataclass(frozen=True)
class Fit:
    """A law with its coefficients.

    Attributes:
        values: Coefficient → value, N in parameters and D in tokens.
        intervals: Coefficient → (2.5 %, 97.5 %) of the bootstrap; empty without one.
    """

    law: Law
    values: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def predict(self, points: Losses) -> np.ndarray:
        """Return the loss of every point in nats per token, (n,)."""
        return self.law.predict(self.values, points)

    def error(self, points: Losses) -> float:
        """Return the root mean square residual on `points`, in nats."""
        return float(np.sqrt(np.mean((points.loss - self.predict(points)) ** 2)))

    def r_squared(self, points: Losses) -> float:
        """Return the coefficient of determination on `points`; at most 1."""
        return 1 - self.error(points) ** 2 / float(points.loss.var())


def fit(law: Law, points: Losses, *, seed: int = 0, starts: int = 6) -> Fit:
    """Fit a law to at least as many points as it has coefficients; refine the best starts."""
    problem = _Problem(law, points)
    found = [problem.refine(start) for start in problem.starts(seed, starts)]
    return Fit(law, problem.values(min(found, key=lambda solution: solution.cost).x))


def bootstrap(fitted: Fit, points: Losses, *, samples: int, seed: int = 0) -> Fit:
    """Return the fit with 95 % intervals over resampled runs, or points where there is one run.

    Points of a run share its noise, so runs are resampled whole. A refit starts at the fit. No
    samples give no intervals.
    """
    if not samples:
        return fitted
    random = np.random.default_rng(seed)
    names, inverse = np.unique(points.run, return_inverse=True)
    members = [np.flatnonzero(inverse == index) for index in range(len(names))]
    if len(members) == 1:
        members = [np.array([index]) for index in range(len(points))]
    start = _Problem(fitted.law, points).packed(fitted.values)
    drawn: list[Mapping[str, float]] = []
    for _ in range(samples):
        chosen = random.integers(len(members), size=len(members))
        problem = _Problem(fitted.law, points[np.concatenate([members[i] for i in chosen])])
        drawn.append(problem.values(problem.refine(start).x))
    intervals: dict[str, tuple[float, float]] = {}
    for name in fitted.law.coefficients:
        low, high = np.quantile([values[name] for values in drawn], (0.025, 0.975))
        intervals[name] = float(low), float(high)
    return replace(fitted, intervals=intervals)


class _Problem:
    """A law and the points it is fitted to; vectors hold logarithms of positive coefficients."""

    def __init__(self, law: Law, points: Losses) -> None:
        self._law, self._points = law, points
        bounds = [(1e-26, 1e26)] * 3 + [shape.bounds for shape in law.shape.values()]
        self._in_log = np.array([low > 0 for low, _ in bounds])
        self._low, self._high = map(self._logs, np.array(bounds).T)

    def starts(self, seed: int, count: int) -> list[np.ndarray]:
        """Return the best random shapes, with their amplitudes solved linearly."""
        from scipy.optimize import nnls

        random = np.random.default_rng(seed)
        law, loss = self._law, self._points.loss
        scored: list[tuple[float, int, np.ndarray]] = []
        for index in range(_CANDIDATES):
            shape = {
                name: float(
                    np.exp(random.uniform(*np.log(kind.start)))
                    if kind.start[0] > 0
                    else random.uniform(*kind.start)
                )
                for name, kind in law.shape.items()
            }
            terms = np.stack(law.terms(shape, self._points), axis=1)
            scale = terms.max(axis=0)  # of the order of the loss: nnls is not scale-free
            factors, error = nnls(np.column_stack([np.ones(len(loss)), terms / scale]), loss)
            factors = np.maximum(factors, 1e-4) / np.array([1.0, *scale])
            values = dict(zip("EAB", factors, strict=True)) | shape
            scored.append((float(error), index, self.packed(values)))
        return [start for _, _, start in sorted(scored, key=lambda item: item[:2])[:count]]

    def refine(self, start: np.ndarray) -> Any:
        from scipy.optimize import least_squares

        measured = np.log(self._points.loss)
        return least_squares(
            lambda x: np.log(self._law.predict(self._plain(x), self._points)) - measured,
            np.clip(start, self._low + 1e-9, self._high - 1e-9),
            jac="cs",  # a complex step is as exact as a derivative
            bounds=(self._low, self._high),
            loss="huber",
            f_scale=HUBER_DELTA,
            x_scale="jac",
            xtol=_TOLERANCE,
            ftol=_TOLERANCE,
            gtol=_TOLERANCE,
            max_nfev=_EVALUATIONS,
        )

    def packed(self, values: Mapping[str, float]) -> np.ndarray:
        return self._logs(np.array([values[name] for name in self._law.coefficients]))

    def values(self, vector: np.ndarray) -> dict[str, float]:
        return {name: float(value) for name, value in self._plain(vector).items()}

    def _logs(self, plain: np.ndarray) -> np.ndarray:
        return np.where(self._in_log, np.log(np.where(self._in_log, plain, 1.0)), plain)

    def _plain(self, vector: np.ndarray) -> dict[str, Any]:
        plain = np.where(self._in_log, np.exp(np.where(self._in_log, vector, 0.0)), vector)
        return dict(zip(self._law.coefficients, plain, strict=True))
