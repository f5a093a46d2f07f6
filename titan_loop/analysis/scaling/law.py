"""Forms of scaling laws of looped models: loss by parameters, tokens, recurrent steps and experts.

    additive        L = E + A/(N + t1)^alpha + B/(D + t2)^beta + C/(R + t3)^gamma
    linear, power,
    bounded         L = E + A/N_eff^alpha + B/D^beta
    sparse          L = E + A·X^delta/N_eff^(alpha + gamma·ln X) + B·X^omega/D^(beta + zeta·ln X)

N_eff is the size of an equally good model without loops. It grows with R: linearly, as a power, or
up to a bound. `Law.formula` has the equations; X is in `log_experts`.

Sources: Zhu et al. 2025 (Ouro), arXiv 2510.25741, Appendices D and E (additive; they publish R² but
no coefficients). Schwethelm et al. 2026, arXiv 2604.21106 (power). Chen et al. 2026, arXiv
2609.40316 (bounded, sparse; their exponents of N_eff and D have the opposite sign).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Measured losses; every array has shape (n,), one entry per point.

    Attributes:
        parameters: N, parameters that act on a token, without embedding and head; shared weights
            count once.
        looped: Part of N that runs at every recurrent step.
        total: N and the idle experts.
        experts: E, number of experts for each one that acts on a token; 1 for a dense model.
        tokens: D, tokens trained on.
        unique: Part of D that was read for the first time.
        steps: R of the total loss, or the step after which the loss was read.
        loss: Nats per token.
        run: Name of the run; its points share their noise.
        width: Points of one width are one size when sizes are held out; N if it is unknown.
    """

    parameters: np.ndarray
    looped: np.ndarray
    total: np.ndarray
    experts: np.ndarray
    tokens: np.ndarray
    unique: np.ndarray
    steps: np.ndarray
    loss: np.ndarray
    run: np.ndarray
    width: np.ndarray

    @classmethod
    def unmeasured(cls, **columns: Any) -> "Losses":
        """Return points to predict from all columns but the last three, at one length.

        `total`, `experts` and `unique` may be left out: no experts, all tokens unique.
        """
        size, tokens = columns["parameters"], columns["tokens"]
        given = {"total": size, "experts": 1.0, "unique": tokens, **columns}
        found = np.broadcast_arrays(*map(np.atleast_1d, given.values()))
        rest = dict.fromkeys(("loss", "run", "width"), np.full(found[0].shape, np.nan))
        return cls(**dict(zip(given, found, strict=True)), **rest)

    def __len__(self) -> int:
        return len(self.loss)

    def __getitem__(self, chosen: np.ndarray) -> "Losses":
        """Return the points that a mask or an array of indices chooses."""
        return Losses(**{item.name: getattr(self, item.name)[chosen] for item in fields(self)})


Values: TypeAlias = Mapping[str, Any]
"""Coefficient → value: a number, or a column (k, 1) to predict with k fits at once."""


class Coefficient(NamedTuple):
    """A coefficient inside a term of a law.

    Attributes:
        start: Range from which random starts are drawn.
        bounds: Range that a fit may search.
        unit: Column whose geometric mean is the ranges' unit, "parameters" or "tokens"; "" for 1.
    """

    start: tuple[float, float]
    bounds: tuple[float, float]
    unit: str = ""

    @property
    def is_positive(self) -> bool:
        """Whether all allowed values are positive; then its logarithm is fitted."""
        return self.bounds[0] > 0


@dataclass(frozen=True)
class Law:
    """A form of the law: a constant plus amplitudes times terms.

    Attributes:
        name: Name on the command line and in files.
        shape: Coefficients inside the terms, by name.
        amplitudes: Names of the constant and of the factors of the terms; all are positive.
        terms: Maps coefficients and points to the terms without factors, shaped as in `predict`.
    """

    name: str
    formula: str
    shape: Mapping[str, Coefficient]
    amplitudes: Sequence[str]
    terms: Callable[[Values, Losses], list[np.ndarray]]

    @property
    def coefficients(self) -> tuple[str, ...]:
        """Names of all coefficients."""
        return (*self.amplitudes, *self.shape)

    def predict(self, values: Values, points: Losses) -> np.ndarray:
        """Return the loss of every point in nats per token, (n,), or (k, n) for columns."""
        constant, *factors = (values[name] for name in self.amplitudes)
        terms = self.terms(values, points)
        return constant + sum(a * term for a, term in zip(factors, terms, strict=True))


def _linear(values: Values, points: Losses) -> np.ndarray:
    return values["kappa"] * (points.steps - 1)


def _power(values: Values, points: Losses) -> np.ndarray:
    return points.steps ** values["phi"] - 1


def _bounded(values: Values, points: Losses) -> np.ndarray:
    # m^−theta, m = N/total: for theta > 0, sparser models reach a higher bound, later.
    gain = (points.parameters / points.total) ** -values.get("theta", 0.0)
    passed = -np.expm1(-(points.steps - 1) / (values["kappa2"] * gain))
    return values["kappa1"] * gain * passed


def effective_parameters(gain: np.ndarray, points: Losses) -> np.ndarray:
    """Return N_eff = N + N_looped·gain, shaped like `gain`; gain 0 is a model without loops."""
    return points.parameters + points.looped * gain


def log_experts(values: Values, experts: np.ndarray) -> np.ndarray:
    """Return ln X, where 1/X = 1/(E − 1 + 1/(1/E_start − 1/E_max)) + 1/E_max.

    Source: Clark et al. 2022, arXiv 2202.01169, Eq. 10: one expert counts as E_start, and many
    count for at most E_max.
    """
    first = 1 / (1 / values["E_start"] - 1 / values["E_max"])
    return -np.log(1 / (experts - 1 + first) + 1 / values["E_max"])


_EXPONENT = Coefficient((0.05, 2.0), (1e-3, 5.0))
_SIGNED = Coefficient((-0.1, 0.1), (-2.0, 2.0))
_PHI = Coefficient((0.0, 1.0), (-1.0, 3.0))
_KAPPA = Coefficient((0.05, 2.0), (1e-4, 1e3))


def _offset(unit: str) -> Coefficient:
    return Coefficient((1e-4, 1.0), (1e-8, 1e8), unit)


def _additive_terms(values: Values, points: Losses) -> list[np.ndarray]:
    variables = (
        (points.parameters, "t1", "alpha"),
        (points.tokens, "t2", "beta"),
        (points.steps, "t3", "gamma"),
    )
    return [(value + values[offset]) ** -values[power] for value, offset, power in variables]


ADDITIVE = Law(
    "additive",
    "L = E + A/(N + t1)^alpha + B/(D + t2)^beta + C/(R + t3)^gamma",
    {
        "alpha": _EXPONENT,
        "t1": _offset("parameters"),
        "beta": _EXPONENT,
        "t2": _offset("tokens"),
        "gamma": _EXPONENT,
        "t3": _offset(""),
    },
    ("E", "A", "B", "C"),
    _additive_terms,
)


def _dense(
    name: str,
    effective: str,
    gain: Callable[[Values, Losses], np.ndarray],
    shape: Mapping[str, Coefficient],
) -> Law:
    def terms(values: Values, points: Losses) -> list[np.ndarray]:
        by_size = effective_parameters(gain(values, points), points) ** -values["alpha"]
        return [by_size, points.tokens ** -values["beta"]]

    return Law(
        name,
        f"L = E + A/(N + N_looped·{effective})^alpha + B/D^beta",
        {"alpha": _EXPONENT, "beta": _EXPONENT, **shape},
        ("E", "A", "B"),
        terms,
    )


_BOUND = {"kappa1": _KAPPA, "kappa2": _KAPPA}
LINEAR = _dense("linear", "kappa·(R − 1)", _linear, {"kappa": _KAPPA})
POWER = _dense("power", "(R^phi − 1)", _power, {"phi": _PHI})
BOUNDED = _dense("bounded", "kappa1·(1 − exp(−(R − 1)/kappa2))", _bounded, _BOUND)


def _sparse(dense: Law, gain: Callable[[Values, Losses], np.ndarray]) -> Law:
    """Return a law with experts; A, B, delta and omega are for N and D in units of 1e9."""

    def terms(values: Values, points: Losses) -> list[np.ndarray]:
        log_x = log_experts(values, points.experts)
        size = effective_parameters(gain(values, points), points) / 1e9
        by_size = np.exp(values["delta"] * log_x) * size ** -(
            values["alpha"] + values["gamma"] * log_x
        )
        by_tokens = np.exp(values["omega"] * log_x) * (points.tokens / 1e9) ** -(
            values["beta"] + values["zeta"] * log_x
        )
        return [by_size, by_tokens]

    bounded = {"theta": Coefficient((0.0, 0.5), (-1.0, 3.0))} if dense is BOUNDED else {}
    return Law(
        f"{dense.name}_sparse",
        dense.formula.replace("kappa1", "kappa1·m^−theta")
        .replace("kappa2", "(kappa2·m^−theta)")
        .replace("A/", "A·X^delta/")
        .replace("^alpha", "^(alpha + gamma·ln X)")
        .replace("B/D^beta", "B·X^omega/D^(beta + zeta·ln X)"),
        {
            **dict.fromkeys(("alpha", "beta"), _EXPONENT),
            **dict.fromkeys(("delta", "gamma", "omega", "zeta"), _SIGNED),
            "E_start": Coefficient((1.0, 2.0), (0.5, 10.0)),
            "E_max": Coefficient((20.0, 200.0), (11.0, 1e4)),
            **dense.shape,
            **bounded,
        },
        dense.amplitudes,
        terms,
    )


def with_repeats(law: Law) -> Law:
    """Return a law in which a repeated token counts for less than a new one.

        D_eff = U + U·reuse·(1 − exp(−(D/U − 1)/reuse)),   U unique tokens

    Source: Muennighoff et al. 2023, arXiv 2305.16264, Eq. 5 (R_D* is `reuse`; they find 15.4).
    """

    def terms(values: Values, points: Losses) -> list[np.ndarray]:
        again = points.tokens / points.unique - 1
        counted = 1 - values["reuse"] * np.expm1(-again / values["reuse"])
        return law.terms(values, replace(points, tokens=points.unique * counted))

    shape = {**law.shape, "reuse": Coefficient((1.0, 50.0), (1e-2, 1e4))}
    formula = law.formula.replace("/D", "/D_eff").replace("(D +", "(D_eff +")
    return replace(law, formula=formula, shape=shape, terms=terms)


SPARSE = {
    law.name: _sparse(law, gain)
    for law, gain in ((LINEAR, _linear), (POWER, _power), (BOUNDED, _bounded))
}
"""Form of N_eff → its law with experts."""

DENSE = {law.name: law for law in (LINEAR, POWER, BOUNDED)}
"""Form of N_eff → its law without experts."""

LAWS = {law.name: law for law in (ADDITIVE, *DENSE.values(), *SPARSE.values())}
"""Name of a form → its law."""
