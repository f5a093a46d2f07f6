"""Forms of scaling laws of looped models: loss by parameters, tokens and recurrent steps.

    L = E + A/N_eff^alpha + B/D^beta,   N_eff = N + N_looped · gain(R)

N_eff is the size of an equally good model without loops. Its gain grows with R: linearly, as a
power, or up to a bound. `Law.formula` has the equations.

Sources: Schwethelm et al. 2026, arXiv 2604.21106 (power). Chen et al. 2026, arXiv 2609.40316
(bounded; their exponents of N_eff and D have the opposite sign).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
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
        tokens: D, tokens trained on.
        steps: Trained R.
        loss: Nats per token.
        run: Name of the run; its points share their noise.
        width: Points of one width are one size when sizes are held out; N if it is unknown.
    """

    parameters: np.ndarray
    looped: np.ndarray
    tokens: np.ndarray
    steps: np.ndarray
    loss: np.ndarray
    run: np.ndarray
    width: np.ndarray

    @classmethod
    def of(cls, points: Sequence[Mapping[str, Any]]) -> "Losses":
        """Return the columns of points, which map every field to its value."""
        return cls(**{f.name: np.array([p[f.name] for p in points]) for f in fields(cls)})

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
    """Return `parameters` and `looped`, which `Losses` describes."""
    from titan_loop.distributed.state_bytes import unit_sizes  # slow: imports torchtitan

    units = [unit for unit in unit_sizes(model) if unit.unit.name != TABLES]
    total = sum(unit.parameters() for unit in units)
    looped = sum(unit.parameters() for unit in units if unit.unit.is_looped)
    return {
        "parameters": total - model.idle_parameters(),
        "looped": looped - model.idle_parameters(looped=True),
    }


Values: TypeAlias = Mapping[str, Any]
"""Coefficient → value."""


class Coefficient(NamedTuple):
    """A coefficient inside a term: the ranges of random starts, and that a fit may search."""

    start: tuple[float, float]
    bounds: tuple[float, float]


@dataclass(frozen=True)
class Law:
    """A form of the law: E, and the factors A and B times two terms; all three are positive.

    Attributes:
        shape: Coefficients inside the terms, by name.
        gain: Maps coefficients and R to the gain of N_looped; 0 at R = 1.
    """

    name: str
    formula: str
    gain: Callable[[Values, np.ndarray], np.ndarray]
    shape: Mapping[str, Coefficient]

    @property
    def coefficients(self) -> tuple[str, ...]:
        """Names of all coefficients."""
        return ("E", "A", "B", *self.shape)

    def terms(self, values: Values, points: Losses) -> tuple[np.ndarray, np.ndarray]:
        """Return both terms without their factors, (n,) each."""
        effective = points.parameters + points.looped * self.gain(values, points.steps)
        return effective ** -values["alpha"], points.tokens ** -values["beta"]

    def predict(self, values: Values, points: Losses) -> np.ndarray:
        """Return the loss of every point in nats per token, (n,)."""
        by_size, by_tokens = self.terms(values, points)
        return values["E"] + values["A"] * by_size + values["B"] * by_tokens


def _law(name: str, text: str, gain: Any, **shape: Coefficient) -> Law:
    exponent = Coefficient((0.05, 2.0), (1e-3, 5.0))
    formula = f"L = E + A/(N + N_looped·{text})^alpha + B/D^beta"
    return Law(name, formula, gain, {"alpha": exponent, "beta": exponent, **shape})


_KAPPA = Coefficient((0.05, 2.0), (1e-4, 1e3))

LAWS = {
    "linear": _law(
        "linear", "kappa·(R − 1)", lambda v, steps: v["kappa"] * (steps - 1), kappa=_KAPPA
    ),
    "power": _law(
        "power",
        "(R^phi − 1)",
        lambda v, steps: steps ** v["phi"] - 1,
        phi=Coefficient((0.0, 1.0), (-1.0, 3.0)),
    ),
    "bounded": _law(
        "bounded",
        "kappa1·(1 − exp(−(R − 1)/kappa2))",
        lambda v, steps: -v["kappa1"] * np.expm1(-(steps - 1) / v["kappa2"]),
        kappa1=_KAPPA,
        kappa2=_KAPPA,
    ),
}
"""Form of the gain → its law."""
