"""Share of seeds whose held-out error chooses the true form of a law, and coverage of intervals.

    python -m tools.bench.law_choice [--seeds 20] [--noise 0.005] [--bootstrap 100]

Losses of five sizes, ten budgets and R = 1, 2, 4, 8 from each form of the worth of a step, with
normal noise in nats. Prints a row a form: right choices, and the share of coefficients inside of
their 95 % intervals.
"""

import argparse
import itertools

import numpy as np

from titan_loop.analysis.scaling.data import ScalingData
from titan_loop.analysis.scaling.law import DENSE, Losses
from titan_loop.analysis.scaling.study import study

BASE = {"E": 1.7, "A": 400.0, "alpha": 0.34, "B": 410.0, "beta": 0.28}
GAINS = {
    "linear": {"kappa": 0.2},
    "power": {"phi": 0.46},
    "bounded": {"kappa1": 0.9, "kappa2": 1.4},
}
SIZES = (53e6, 134e6, 374e6, 778e6, 1.364e9)
TOKENS = np.geomspace(1e9, 20e9, 10)


def losses(form: str, noise: float, seed: int) -> Losses:
    """Return points of a form with noise; 80 % of the parameters are looped."""
    grid = np.array(list(itertools.product(SIZES, TOKENS, (1, 2, 4, 8))))
    exact = Losses(
        parameters=grid[:, 0],
        looped=0.8 * grid[:, 0],
        total=grid[:, 0],
        experts=np.ones(len(grid)),
        tokens=grid[:, 1],
        unique=grid[:, 1],
        steps=grid[:, 2],
        loss=np.ones(len(grid)),
        run=np.arange(len(grid)).astype(str),
        width=grid[:, 0],
    )
    values = BASE | GAINS[form]
    exact.loss[:] = DENSE[form].predict(values, exact)
    exact.loss[:] += noise * np.random.default_rng(seed).normal(size=len(grid))
    return exact


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--noise", type=float, default=0.005)
    parser.add_argument("--bootstrap", type=int, default=100)
    flags = parser.parse_args()
    for form in DENSE:
        right, inside = 0, []
        for seed in range(flags.seeds):
            data = ScalingData(losses(form, flags.noise, seed), {}, 0, {})
            laws = {law.fit.law.name: law for law in study(data, samples=flags.bootstrap).laws}
            right += laws[form].chosen
            for name, value in (BASE | GAINS[form]).items():
                low, high = laws[form].fit.intervals[name]
                inside.append(low <= value <= high)
        print(f"{form}: {right} of {flags.seeds} chosen, {np.mean(inside):.0%} inside", flush=True)


if __name__ == "__main__":
    main()
