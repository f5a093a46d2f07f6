"""Laws with planted coefficients, written out in float64, and losses that follow them."""

import itertools

import numpy as np

from titan_loop.analysis.scaling.law import Losses

SIZES = (53e6, 134e6, 374e6, 778e6, 1.364e9)
TOKENS = np.linspace(1e9, 20e9, 20)
BASE = {"E": 1.7, "A": 400.0, "alpha": 0.34, "B": 410.0, "beta": 0.28}
GAINS = {
    "linear": {"kappa": 0.2},
    "power": {"phi": 0.46},
    "bounded": {"kappa1": 0.9, "kappa2": 1.4},
}


def by_gain(form: str):
    """A form's law written out; 80 % of the parameters are looped."""

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
        tokens=grid[:, 1],
        steps=grid[:, 2],
        loss=exact + noise * np.random.default_rng(seed).normal(size=len(grid)),
        run=np.array([f"{n}-{r}" for n, _, r in grid]),
        width=grid[:, 0],
    )
