"""Laws with planted coefficients, written out in float64, and losses that follow them."""

import csv
import itertools
from pathlib import Path

import numpy as np

from titan_loop.analysis.scaling.law import (
    Losses,
)

SIZES = (53e6, 134e6, 374e6, 778e6, 1.364e9)
TOKENS = np.linspace(1e9, 20e9, 20)
PLANTED = {
    "E": 1.7, "A": 400.0, "alpha": 0.34, "t1": 2e6, "B": 410.0, "beta": 0.28, "t2": 2e8,
    "C": 0.3, "gamma": 0.7, "t3": 0.5,
}  # fmt: skip
BASE = {"E": 1.7, "A": 400.0, "alpha": 0.34, "B": 410.0, "beta": 0.28}
BY_POWER = {**BASE, "phi": 0.46}
GAINS = {
    "linear": {"kappa": 0.2},
    "power": {"phi": 0.46},
    "bounded": {"kappa1": 0.9, "kappa2": 1.4},
}


def additive(n: float, d: float, r: float) -> float:
    """The law written out, in float64."""
    c = PLANTED
    return (
        c["E"]
        + c["A"] / (n + c["t1"]) ** c["alpha"]
        + c["B"] / (d + c["t2"]) ** c["beta"]
        + c["C"] / (r + c["t3"]) ** c["gamma"]
    )


def joint(n: float, d: float, r: float) -> float:
    """The law written out; 80 % of the parameters are looped."""
    c = BY_POWER
    effective = 0.2 * n + 0.8 * n * r ** c["phi"]
    return c["E"] + c["A"] / effective ** c["alpha"] + c["B"] / d ** c["beta"]


def by_gain(form: str):
    """A mapping's law written out; 80 % of the parameters are looped."""

    def law(n: float, d: float, r: float) -> float:
        c = GAINS[form]
        gain = {
            "linear": lambda: c["kappa"] * (r - 1),
            "power": lambda: r ** c["phi"] - 1,
            "bounded": lambda: c["kappa1"] * (1 - np.exp(-(r - 1) / c["kappa2"])),
        }[form]()
        effective = n + 0.8 * n * gain
        return BASE["E"] + BASE["A"] / effective ** BASE["alpha"] + BASE["B"] / d ** BASE["beta"]

    return law


def losses(law, steps=(1, 2, 4, 8), noise: float = 0.0, seed: int = 0, tokens=TOKENS) -> Losses:
    grid = np.array(list(itertools.product(SIZES, tokens, steps)))
    exact = np.array([law(*row) for row in grid])
    return Losses(
        parameters=grid[:, 0],
        looped=0.8 * grid[:, 0],
        total=grid[:, 0],
        experts=np.ones(len(grid)),
        tokens=grid[:, 1],
        unique=grid[:, 1],
        steps=grid[:, 2],
        loss=exact + noise * np.random.default_rng(seed).normal(size=len(grid)),
        run=np.array([f"{n}-{r}" for n, _, r in grid]),
        width=grid[:, 0],
    )


def write_csv(path: Path, *, rising: bool = False) -> Path:
    """Step-wise losses and totals of four sizes at R = 1, 2 and 4, composed with known weights."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["parameters", "tokens", "recurrent_steps", "step", "loss"])
        for n, steps, d in itertools.product(SIZES[:4], (1, 2, 4), TOKENS[::4]):
            by_step = [additive(n, d, r) for r in range(1, steps + 1)]
            if rising and n == SIZES[0]:
                by_step[0] = 3 + d / 1e11
            weights = np.arange(1, steps + 1) / sum(range(1, steps + 1))
            for step, loss in enumerate(by_step, start=1):
                writer.writerow([n, d, steps, step, loss])
            writer.writerow([n, d, steps, "", float(weights @ by_step)])
    return path
