"""xLLM-Loop's random depths: capped Poisson-lognormal draws, one for each training step.

    R = min(cap, 1 + Poisson(exp τ)),   τ ~ N(μ, σ²),   μ such that E[R] is the given mean

A draw inverts the cumulative distribution at a uniform number u, which depends on the seed and the
draw's index only: all ranks agree without communication, and a resumed run repeats its draws.

Source: Huang et al. 2026 (xLLM-Loop), arXiv 2610.06833 II, and their code, which draws for every
micro-batch.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from titan_loop.errors import UserError
from titan_loop.training.callback import Callback, TrainingState
from titan_loop.training.depth_schedule import poisson_lognormal
from titan_loop.training.step_plan import StepPlan

SEED = 514_229
"""The seed of the authors' runs."""


def capped_depths(mean: float, sigma: float, most: int) -> NDArray[np.float64]:
    """Return the probabilities of 1 … `most` recurrent steps, (most,).

    Args:
        mean: E[R], after the cap.
        sigma: σ, above 0 and below 3.
        most: The cap.

    Raises:
        UserError: The mean is not between 1 and `most`, or σ is out of range.
    """
    if not 1 < mean < most:
        raise UserError(f"mean={mean} recurrent steps must be above 1 and below most={most}")
    if not 0 < sigma < 3:
        raise UserError(f"sigma={sigma} must be above 0 and below 3")
    from scipy.optimize import brentq  # takes a third of a second, and other families none of it

    depths = np.arange(1, most + 1)

    def excess(mu: float) -> float:
        return float(poisson_lognormal(mu, sigma, most) @ depths) - mean

    mu = cast(float, brentq(excess, -20, 20, xtol=1e-15))
    return poisson_lognormal(mu, sigma, most)


@dataclass(frozen=True, kw_only=True)
class DrawnDepth(Callback):
    """Draws R of every training step, from the probabilities of R = 1, 2 and so on."""

    probabilities: Sequence[float]
    seed: int = SEED

    def plan(self, trainer: TrainingState, plan: StepPlan) -> StepPlan:
        return replace(plan, recurrent_steps=self.draw(plan.step - 1))

    def draw(self, index: int) -> int:
        """Return draw `index`, counted from 0."""
        generator = torch.Generator().manual_seed(index + self.seed)
        uniform = float(torch.rand((), generator=generator))
        upto = np.minimum(np.cumsum(self.probabilities), 1.0)
        upto[-1] = 1.0
        return min(bisect_left(upto, uniform) + 1, len(upto))
