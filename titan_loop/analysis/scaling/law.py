"""Forms of scaling laws of looped models: loss by parameters, tokens, recurrent steps and experts.

    linear, power,
    bounded     L = E + A/N_eff^alpha + B/D^beta
    sparse      L = E + A·X^delta/N_eff^(alpha + gamma·ln X) + B·X^omega/D^(beta + zeta·ln X)

N_eff is the size of an equally good model without loops. It grows with R: linearly, as a power, or
up to a bound. `Law.formula` has the equations; X is in `log_experts`.

Sources: Schwethelm et al. 2026, arXiv 2604.21106 (power). Chen et al. 2026, arXiv 2609.40316
(bounded, sparse; their exponents of N_eff and D have the opposite sign).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from titan_loop.models.units import TABLES

if TYPE_CHECKING:
    from titan_loop.models.decoder import LoopDecoder


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
        steps: Trained R.
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
    def of(cls, points: Sequence[Mapping[str, Any]]) -> "Losses":
        """Return the columns of points, which map every field to its value."""
        return cls(**{f.name: np.array([p[f.name] for p in points]) for f in fields(cls)})

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

    def late(self, share: float) -> "Losses":
        """Return the points after the first `share` of every run's tokens."""
        _, run = np.unique(self.run, return_inverse=True)
        longest = np.zeros(len(self))
        np.maximum.at(longest, run, self.tokens)
        return self[self.tokens >= share * longest[run]]


def model_sizes(model: "LoopDecoder.Config") -> dict[str, float]:
    """Return `parameters`, `looped`, `total` and `experts`, which `Losses` describes."""
    from titan_loop.distributed.state_bytes import unit_sizes  # slow: imports torchtitan

    units = [unit for unit in unit_sizes(model) if unit.unit.name != TABLES]
    total = sum(unit.parameters() for unit in units)
    looped = sum(unit.parameters() for unit in units if unit.unit.is_looped)
    return {
        "parameters": total - model.idle_parameters(),
        "looped": looped - model.idle_parameters(looped=True),
        "total": total,
        "experts": model.experts_per_active,
    }


Values: TypeAlias = Mapping[str, Any]
"""Coefficient → value: a number, or a column (k, 1) to predict with k fits at once."""


class Coefficient(NamedTuple):
    """A coefficient inside a term of a law.

    Attributes:
        start: Range from which random starts are drawn.
        bounds: Range that a fit may search.
    """

    start: tuple[float, float]
    bounds: tuple[float, float]

    @property
    def is_positive(self) -> bool:
        """Whether all allowed values are positive; then its logarithm is fitted."""
        return self.bounds[0] > 0


@dataclass(frozen=True)
class Law:
    """A form of the law: E, and the factors A and B times two terms; all three are positive.

    Attributes:
        shape: Coefficients inside the terms, by name.
        terms: Maps coefficients and points to both terms without factors, shaped as in `predict`.
    """

    name: str
    formula: str
    shape: Mapping[str, Coefficient]
    terms: Callable[[Values, Losses], list[np.ndarray]]

    @property
    def coefficients(self) -> tuple[str, ...]:
        """Names of all coefficients."""
        return ("E", "A", "B", *self.shape)

    def predict(self, values: Values, points: Losses) -> np.ndarray:
        """Return the loss of every point in nats per token, (n,), or (k, n) for columns."""
        by_size, by_tokens = self.terms(values, points)
        return values["E"] + values["A"] * by_size + values["B"] * by_tokens


def _linear(values: Values, points: Losses) -> np.ndarray:
    return values["kappa"] * (points.steps - 1)


def _power(values: Values, points: Losses) -> np.ndarray:
    return points.steps ** values["phi"] - 1


def _bounded(values: Values, points: Losses) -> np.ndarray:
    # m^−theta, m = N/total: for theta > 0, sparser models reach a higher bound, later.
    gain = (points.parameters / points.total) ** -values.get("theta", 0.0)
    passed = -np.expm1(-(points.steps - 1) / (values["kappa2"] * gain))
    return values["kappa1"] * gain * passed


_GAINS = {"linear": _linear, "power": _power, "bounded": _bounded}
"""Form → gain of N_looped by R: N_eff = N + N_looped·gain; 0 at R = 1."""


def _effective(form: str, values: Values, points: Losses) -> np.ndarray:
    return points.parameters + points.looped * _GAINS[form](values, points)


def log_experts(values: Values, experts: np.ndarray) -> np.ndarray:
    """Return ln X, where 1/X = 1/(E − 1 + 1/(1/E_start − 1/E_max)) + 1/E_max.

    Source: Clark et al. 2022, arXiv 2202.01169, Eq. 10: one expert counts as E_start, and many
    count for at most E_max.
    """
    first = 1 / (1 / values["E_start"] - 1 / values["E_max"])
    return -np.log(1 / (experts - 1 + first) + 1 / values["E_max"])


_EXPONENT = Coefficient((0.05, 2.0), (1e-3, 5.0))
_SIGNED = Coefficient((-0.1, 0.1), (-2.0, 2.0))
_KAPPA = Coefficient((0.05, 2.0), (1e-4, 1e3))


def _dense(form: str, effective: str, shape: Mapping[str, Coefficient]) -> Law:
    def terms(values: Values, points: Losses) -> list[np.ndarray]:
        by_size = _effective(form, values, points) ** -values["alpha"]
        return [by_size, points.tokens ** -values["beta"]]

    formula = f"L = E + A/(N + N_looped·{effective})^alpha + B/D^beta"
    return Law(form, formula, {"alpha": _EXPONENT, "beta": _EXPONENT, **shape}, terms)


def _sparse(dense: Law) -> Law:
    """Return a law with experts; A, B, delta and omega are for N and D in units of 1e9."""

    def terms(values: Values, points: Losses) -> list[np.ndarray]:
        log_x = log_experts(values, points.experts)
        size = _effective(dense.name, values, points) / 1e9
        by_size = np.exp(values["delta"] * log_x) * size ** -(
            values["alpha"] + values["gamma"] * log_x
        )
        by_tokens = np.exp(values["omega"] * log_x) * (points.tokens / 1e9) ** -(
            values["beta"] + values["zeta"] * log_x
        )
        return [by_size, by_tokens]

    formula = dense.formula.replace("kappa1", "kappa1·m^−theta")
    for old, new in (
        ("kappa2", "(kappa2·m^−theta)"),
        ("A/", "A·X^delta/"),
        ("^alpha", "^(alpha + gamma·ln X)"),
        ("B/D^beta", "B·X^omega/D^(beta + zeta·ln X)"),
    ):
        formula = formula.replace(old, new)
    shape = {
        **dense.shape,
        **dict.fromkeys(("delta", "gamma", "omega", "zeta"), _SIGNED),
        "E_start": Coefficient((1.0, 2.0), (0.5, 10.0)),
        "E_max": Coefficient((20.0, 200.0), (11.0, 1e4)),
    }
    if dense.name == "bounded":
        shape["theta"] = Coefficient((0.0, 0.5), (-1.0, 3.0))
    return Law(f"{dense.name}_sparse", formula, shape, terms)


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
    return replace(law, formula=law.formula.replace("/D", "/D_eff"), shape=shape, terms=terms)


DENSE = {
    "linear": _dense("linear", "kappa·(R − 1)", {"kappa": _KAPPA}),
    "power": _dense("power", "(R^phi − 1)", {"phi": Coefficient((0.0, 1.0), (-1.0, 3.0))}),
    "bounded": _dense(
        "bounded", "kappa1·(1 − exp(−(R − 1)/kappa2))", {"kappa1": _KAPPA, "kappa2": _KAPPA}
    ),
}
"""Form of N_eff → its law without experts."""

SPARSE = {name: _sparse(law) for name, law in DENSE.items()}
"""Form of N_eff → its law with experts."""

LAWS = {law.name: law for law in (*DENSE.values(), *SPARSE.values())}
"""Name of a form in files → its law."""
