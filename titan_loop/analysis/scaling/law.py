"""Scaling laws of looped models: loss as a function of parameters, tokens and recurrent steps.

    additive   L = E + A/(N + t1)^α + B/(D + t2)^β + C/(R + t3)^γ
    joint      L = E + A/(N_once + N_looped·R^φ)^α + B/D^β

N counts shared weights once. The additive law is Ouro's, for the total loss (R is the number of
steps trained with) and for the loss after each step. In the joint law a step is worth a power of R
in parameters: φ = 1 is as good as untied copies, φ = 0 worth nothing.

A fit is a bounded least-squares problem in the logarithms of the coefficients (φ itself), started
from the best of many random exponents; for given exponents the amplitudes are a linear problem.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, Appendices D and E, which publish R² but no
coefficients; "effective parameters ∝ R^φ": arXiv 2604.21106.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

_CANDIDATES = 512
"""Random exponents per fit, of which the best few are refined."""

_TOLERANCE = 1e-12
_EVALUATIONS = 150
"""Steps of a refinement; without noise and with open coefficients it would crawl along a valley."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Measured losses, one entry per point.

    Attributes:
        parameters: N, shape (n,).
        looped: Parameters among N that are visited at every recurrent step, shape (n,).
        tokens: D, tokens trained on, shape (n,).
        steps: R of the total loss, or the step after which a loss was read, shape (n,).
        loss: Nats per token, shape (n,).
        run: Name of the run a point belongs to, shape (n,).
    """

    parameters: np.ndarray
    looped: np.ndarray
    tokens: np.ndarray
    steps: np.ndarray
    loss: np.ndarray
    run: np.ndarray

    def __len__(self) -> int:
        return len(self.loss)

    def __getitem__(self, chosen: np.ndarray) -> "Losses":
        """Return the points that a mask or an array of indices chooses."""
        return Losses(**{item.name: getattr(self, item.name)[chosen] for item in fields(self)})


@dataclass(frozen=True)
class Law:
    """One form of the law: constant plus terms a_k·x_k^(-exponent_k), smooth in its shape.

    Attributes:
        name: Name on the command line and in files.
        formula: The equation, for people.
        shape: Names of the coefficients inside the terms: (lowest, highest start value).
        amplitudes: Names of E and of the factors of the terms.
        terms: Maps shape and points to the terms without their factors, shape (n, terms), and to
            their derivatives by each shape coefficient, {name: (n, terms)}.
    """

    name: str
    formula: str
    shape: Mapping[str, tuple[float, float]]
    amplitudes: Sequence[str]
    terms: Callable[
        [Mapping[str, float], Losses, Mapping[str, float]], tuple[np.ndarray, dict[str, np.ndarray]]
    ]

    @property
    def coefficients(self) -> tuple[str, ...]:
        """Names of all coefficients."""
        return (*self.amplitudes, *self.shape)


def _additive(
    shape: Mapping[str, float], points: Losses, units: Mapping[str, float]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    terms, slopes = np.empty((len(points), 3)), {}
    variables = ((points.parameters, "t1", "alpha", "N"), (points.tokens, "t2", "beta", "D"))
    for column, (value, offset, exponent, unit) in enumerate(
        (*variables, (points.steps, "t3", "gamma", "R"))
    ):
        shifted = value + shape[offset] * units[unit]
        terms[:, column] = (shifted / units[unit]) ** -shape[exponent]
        for name in (offset, exponent):
            slopes[name] = np.zeros((len(points), 3))
        by_offset = -shape[exponent] * terms[:, column] * units[unit] / shifted
        slopes[offset][:, column] = by_offset
        slopes[exponent][:, column] = -terms[:, column] * np.log(shifted / units[unit])
    return terms, slopes


def _joint(
    shape: Mapping[str, float], points: Losses, units: Mapping[str, float]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    looped = points.looped * points.steps ** shape["phi"]
    effective = points.parameters - points.looped + looped
    terms = np.stack(
        [
            (effective / units["N"]) ** -shape["alpha"],
            (points.tokens / units["D"]) ** -shape["beta"],
        ],
        axis=1,
    )
    slopes = {name: np.zeros_like(terms) for name in ("alpha", "beta", "phi")}
    slopes["alpha"][:, 0] = -terms[:, 0] * np.log(effective / units["N"])
    slopes["beta"][:, 1] = -terms[:, 1] * np.log(points.tokens / units["D"])
    slopes["phi"][:, 0] = -shape["alpha"] * terms[:, 0] * looped * np.log(points.steps) / effective
    return terms, slopes


_EXPONENT = (0.05, 2.0)
_OFFSET = (1e-4, 1.0)
"""In units of the geometric mean of N or D; of R it is an absolute number."""

ADDITIVE = Law(
    "additive",
    "L = E + A/(N + t1)^alpha + B/(D + t2)^beta + C/(R + t3)^gamma",
    {
        "alpha": _EXPONENT,
        "t1": _OFFSET,
        "beta": _EXPONENT,
        "t2": _OFFSET,
        "gamma": _EXPONENT,
        "t3": _OFFSET,
    },
    ("E", "A", "B", "C"),
    _additive,
)
JOINT = Law(
    "joint",
    "L = E + A/(N_once + N_looped·R^phi)^alpha + B/D^beta",
    {"alpha": _EXPONENT, "beta": _EXPONENT, "phi": (0.0, 1.0)},
    ("E", "A", "B"),
    _joint,
)
_SIGNED = "phi"
"""The one coefficient that may be negative, so it is fitted without a logarithm."""


@dataclass(frozen=True)
class Fit:
    """A law with its coefficients.

    Attributes:
        values: Coefficient → value, N and D in parameters and tokens.
        rmse: Root mean square residual over the fitted points, in nats.
        intervals: Coefficient → (2.5 %, 97.5 %) of the bootstrap; empty without one.
    """

    law: Law
    values: Mapping[str, float]
    rmse: float
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def predict(self, points: Losses) -> np.ndarray:
        """Return the loss of every point, shape (n,), in nats per token."""
        units = {"N": 1.0, "D": 1.0, "R": 1.0}
        terms, _ = self.law.terms(self.values, points, units)
        factors = np.array([self.values[name] for name in self.law.amplitudes])
        return factors[0] + terms @ factors[1:]

    def r_squared(self, points: Losses) -> float:
        """Return the coefficient of determination on `points`; at most 1."""
        residual = points.loss - self.predict(points)
        return float(1 - np.sum(residual**2) / np.sum((points.loss - points.loss.mean()) ** 2))


def fit(law: Law, points: Losses, *, seed: int = 0, starts: int = 6) -> Fit:
    """Fit a law by least squares on the loss.

    Args:
        points: At least as many as the law has coefficients.
        starts: Number of starts that are refined.
    """
    units = _units(points)
    best = None
    for start in _starts(law, points, units, seed, starts):
        solution = _refine(law, points, units, start)
        if best is None or solution.cost < best.cost:
            best = solution
    assert best is not None
    return _as_fit(law, points, units, best)


def bootstrap(fitted: Fit, points: Losses, *, samples: int, seed: int = 0) -> Fit:
    """Return the fit with 95 % intervals over resampled runs, or points where there is one run.

    Points of a run share its noise, so runs are resampled whole. A refit starts at the fit.

    Args:
        samples: Number of resamplings; 0 gives no intervals.
    """
    if not samples:
        return fitted
    random = np.random.default_rng(seed)
    names, inverse = np.unique(points.run, return_inverse=True)
    members = [np.flatnonzero(inverse == index) for index in range(len(names))]
    if len(members) == 1:
        members = [np.array([index]) for index in range(len(points))]
    drawn: dict[str, list[float]] = {name: [] for name in fitted.law.coefficients}
    units = _units(points)
    start = _packed(fitted.law, _scaled(fitted.law, fitted.values, units, inverse=False))
    for _ in range(samples):
        chosen = random.integers(len(members), size=len(members))
        sample = points[np.concatenate([members[index] for index in chosen])]
        refit = _as_fit(fitted.law, sample, units, _refine(fitted.law, sample, units, start))
        for name, value in refit.values.items():
            drawn[name].append(value)
    low_high = {
        name: (float(np.quantile(values, 0.025)), float(np.quantile(values, 0.975)))
        for name, values in drawn.items()
    }
    return Fit(fitted.law, fitted.values, fitted.rmse, low_high)


def _units(points: Losses) -> dict[str, float]:
    """Return the scale of N and D: with it all coefficients are of the order of one."""
    return {
        "N": float(np.exp(np.mean(np.log(points.parameters)))),
        "D": float(np.exp(np.mean(np.log(points.tokens)))),
        "R": 1.0,
    }


def _starts(
    law: Law, points: Losses, units: Mapping[str, float], seed: int, count: int
) -> list[np.ndarray]:
    """Return the packed coefficients of the best random shapes, amplitudes solved linearly."""
    from scipy.optimize import nnls

    random = np.random.default_rng(seed)
    scored: list[tuple[float, int, np.ndarray]] = []
    for index in range(_CANDIDATES):
        shape = {
            name: (
                random.uniform(low, high)
                if name == _SIGNED
                else float(np.exp(random.uniform(np.log(low), np.log(high))))
            )
            for name, (low, high) in law.shape.items()
        }
        terms, _ = law.terms(shape, points, units)
        factors, error = nnls(np.column_stack([np.ones(len(points)), terms]), points.loss)
        values = dict(zip(law.amplitudes, np.maximum(factors, 1e-4), strict=True)) | shape
        scored.append((float(error), index, _packed(law, values)))
    return [start for _, _, start in sorted(scored, key=lambda item: item[:2])[:count]]


def _refine(law: Law, points: Losses, units: Mapping[str, float], start: np.ndarray) -> Any:
    from scipy.optimize import least_squares

    names = law.coefficients

    def residuals(packed: np.ndarray) -> np.ndarray:
        values = _unpacked(law, packed)
        terms, _ = law.terms(values, points, units)
        factors = np.array([values[name] for name in law.amplitudes])
        return factors[0] + terms @ factors[1:] - points.loss

    def jacobian(packed: np.ndarray) -> np.ndarray:
        values = _unpacked(law, packed)
        terms, slopes = law.terms(values, points, units)
        factors = np.array([values[name] for name in law.amplitudes])
        columns = [np.full(len(points), factors[0]), *(terms * factors[1:]).T]
        for name in law.shape:
            scale = 1.0 if name == _SIGNED else values[name]
            columns.append(slopes[name] @ factors[1:] * scale)
        return np.stack(columns, axis=1)

    bounds = [_bounds(name) for name in names]
    low, high = (np.array(side) for side in zip(*bounds, strict=True))
    return least_squares(
        residuals,
        np.clip(start, low + 1e-9, high - 1e-9),
        jac=jacobian,  # type: ignore[arg-type]
        bounds=(low, high),
        xtol=_TOLERANCE,
        ftol=_TOLERANCE,
        gtol=_TOLERANCE,
        max_nfev=_EVALUATIONS,
    )


def _bounds(name: str) -> tuple[float, float]:
    """Return the packed bounds: amplitudes and offsets over 16 decades, exponents below 5."""
    if name == _SIGNED:
        return -1.0, 3.0
    return (np.log(1e-3), np.log(5.0)) if len(name) > 2 else (np.log(1e-8), np.log(1e8))


def _packed(law: Law, values: Mapping[str, float]) -> np.ndarray:
    return np.array(
        [values[name] if name == _SIGNED else np.log(values[name]) for name in law.coefficients]
    )


def _unpacked(law: Law, packed: np.ndarray) -> dict[str, float]:
    return {
        name: float(value if name == _SIGNED else np.exp(value))
        for name, value in zip(law.coefficients, packed, strict=True)
    }


def _scaled(
    law: Law, values: Mapping[str, float], units: Mapping[str, float], *, inverse: bool
) -> dict[str, float]:
    """Convert coefficients between units of N and D and parameters and tokens."""
    sign = 1.0 if inverse else -1.0
    result = dict(values)
    for amplitude, exponent, offset, unit in (("A", "alpha", "t1", "N"), ("B", "beta", "t2", "D")):
        result[amplitude] = values[amplitude] * units[unit] ** (sign * values[exponent])
        if offset in law.shape:
            result[offset] = values[offset] * units[unit] ** sign
    return result


def _as_fit(law: Law, points: Losses, units: Mapping[str, float], solution: Any) -> Fit:
    values = _scaled(law, _unpacked(law, solution.x), units, inverse=True)
    return Fit(law, values, float(np.sqrt(2 * solution.cost / len(points))))
