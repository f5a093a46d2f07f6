"""Share of seeds whose held-out error chooses the true form of a law, and coverage of intervals.

    python -m tools.bench.law_choice [--seeds 20] [--noise 0.005] [--bootstrap 100]

Losses of five sizes, ten budgets and R = 1, 2, 4, 8 from each form of the worth of a step, with
normal noise in nats. Prints a row a form: right choices, and the share of coefficients inside of
their 95 % intervals.
"""

import argparse
from dataclasses import replace

import numpy as np

from tests.analysis.scaling.planted import BASE, GAINS, by_gain, losses
from titan_loop.analysis.scaling.law import LAWS, Losses
from titan_loop.analysis.scaling.study import study

TOKENS = np.geomspace(1e9, 20e9, 10)


def independent(form: str, noise: float, seed: int) -> Losses:
    """Return points of a form, each of a run of its own."""
    points = losses(by_gain(form), noise=noise, seed=seed, tokens=TOKENS)
    return replace(points, run=np.arange(len(points)).astype(str))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--noise", type=float, default=0.005)
    parser.add_argument("--bootstrap", type=int, default=100)
    flags = parser.parse_args()
    for form in LAWS:
        right, inside = 0, []
        for seed in range(flags.seeds):
            points = independent(form, flags.noise, seed)
            laws = {law.fit.law.name: law for law in study(points, samples=flags.bootstrap)}
            right += laws[form].chosen
            for name, value in (BASE | GAINS[form]).items():
                low, high = laws[form].fit.intervals[name]
                inside.append(low <= value <= high)
        print(f"{form}: {right} of {flags.seeds} chosen, {np.mean(inside):.0%} inside", flush=True)


if __name__ == "__main__":
    main()
