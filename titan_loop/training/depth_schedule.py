"""The number R of recurrent steps in a training step: scheduled, drawn, or set by the examples.

R follows a schedule of global tokens, or the deepest example of the global batch, or is drawn once
per training step:

    R ~ clip(Poisson(λ), R_min, R_max), or
    R ~ clip(1 + Poisson(exp τ), R_min, R_max),   τ ~ N(log(λ − 1) − σ²/2, σ)

The mean before clipping is λ. A draw depends on (seed, step) alone, and the deepest example on the
numbers of the windows, so ranks agree without communication and a resumed run repeats R.

Source: recurrent-depth transformers with dynamic R (arXiv 2604.07822):
(λ, R_max) = (4, 8), (6, 12), (8, 16) with R_min = 2. Log-normal rate: Geiping et al. 2025, arXiv
2502.05171, §3.3, with σ = 0.5; their λ is ours less 1.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Annotated

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from titan_loop.bounds import FINITE, Hint
from titan_loop.errors import Refusal
from titan_loop.training.schedule import Schedule

_SAMPLES = 4096


@dataclass(kw_only=True, slots=True)
class RecurrenceConfig:
    """The number of times that the looped layers are applied."""

    steps: Annotated[Schedule, Ge(1)] = field(default_factory=lambda: Schedule.constant(4))
    """Recurrent steps R against global tokens, rounded; the mean λ when `poisson` is set."""

    poisson: bool = False
    """Draw R ~ Poisson(steps) for every training step instead of using the scheduled value."""

    lognormal_sigma: Annotated[float, Ge(0), FINITE, Hint("0.5 is usual")] = 0.0
    """With `poisson`: σ of the log of the Poisson rate. Above 0, R is 1 plus a Poisson number with
    a log-normal rate, so that a few draws are far above the mean."""

    from_data: bool = False
    """Run as many steps as the deepest example of the global batch needs, within the limits; for
    loaders that know it. `steps` is then the R that checkpoints record and costs are planned at."""

    max_steps: int | None = None
    """Largest R of any step; None for no limit."""

    min_steps: Annotated[int, Ge(1)] = 1
    """Smallest R of any step."""

    backward_steps: Annotated[int | None, Ge(1)] = None
    """Train through the last k steps only; None for all. Earlier steps then give the layers no
    gradient, and the embedding has none in a step with R > k unless it is tied to the head or
    every step reads it."""

    backward_growth: Annotated[Schedule | None, Ge(1)] = None
    """k against global tokens, rounded, in place of backward_steps: it may grow in training."""

    def backward_steps_at(self, tokens: int) -> int | None:
        """Return k after `tokens` global tokens; None for all steps."""
        growth = self.backward_growth
        return self.backward_steps if growth is None else round(growth(tokens))

    @property
    def most_backward_steps(self) -> int | None:
        """The largest k of the run; None for all steps."""
        growth = self.backward_growth
        return self.backward_steps if growth is None else round(growth.largest)

    def refusals(self) -> Iterator[Refusal]:
        """Refuse settings that exclude each other."""
        steps, most, growth = self.steps, self.max_steps, self.backward_growth
        if not self.poisson and any(knot.value % 1 for knot in steps.knots):
            problem = "is rounded to whole steps; name whole numbers, or draw R with "
            problem += "recurrence.poisson, whose mean it then is"
            yield Refusal.of("recurrence.steps", repr(str(steps)), problem)
        if self.from_data and (self.poisson or most is None):
            problem = "needs recurrence.max_steps, by which memory is planned, and no "
            problem += "recurrence.poisson; set max_steps to the steps of the deepest example and "
            yield Refusal.of("recurrence.from_data", True, problem + "poisson to False")
        if self.lognormal_sigma and not self.poisson:
            problem = "has no effect without recurrence.poisson"
            yield Refusal.of("recurrence.lognormal_sigma", self.lognormal_sigma, problem)
        if growth is not None and self.backward_steps is not None:
            problem = f"is set beside recurrence.backward_steps={self.backward_steps}"
            fix = "set only one of the two"
            yield Refusal.of("recurrence.backward_growth", repr(str(growth)), problem, fix)
        if most is not None and most < self.min_steps:
            problem = f"is below min_steps={self.min_steps}"
            yield Refusal.of("recurrence.max_steps", most, problem, "raise it or set it to None")


def fewest_recurrent_steps(config: RecurrenceConfig) -> int:
    """Return the smallest R that any training step can get."""
    varies = config.poisson or config.from_data
    return _clip(0 if varies else round(config.steps.smallest), config)


def most_recurrent_steps(config: RecurrenceConfig) -> int:
    """Return the R to provide memory for; with σ ≤ 0.7, fewer than 1 in 1,000 draws exceed it."""
    if config.from_data and config.max_steps is not None:
        return config.max_steps
    largest = config.steps.largest
    if not config.poisson:
        return _clip(math.ceil(largest), config)
    sigma = config.lognormal_sigma
    rate = largest - (1 if sigma else 0)
    deviation = math.sqrt(rate + rate**2 * math.expm1(sigma**2))  # √λ without σ
    spread = 4 if not sigma else 7  # a longer tail
    return _clip(math.ceil(largest + spread * deviation), config)


def depths_over(config: RecurrenceConfig, total_tokens: int) -> Counter[tuple[float, float | None]]:
    """Count (R, backward steps k or None) at 4,096 equally spaced points of a run.

    The run has `total_tokens`. A random R counts as its mean before clipping, and k as the mean of
    min(R, k).
    """
    depths: Counter[tuple[float, float | None]] = Counter()
    reached = cache(partial(_mean_reached, config.lognormal_sigma))
    for sample in range(_SAMPLES):
        tokens = int((sample + 0.5) / _SAMPLES * total_tokens)
        steps = config.steps(tokens) if config.poisson else typical_recurrent_steps(config, tokens)
        backward = config.backward_steps_at(tokens)
        if config.poisson and backward is not None:
            backward = reached(steps, backward)
        depths[steps, backward] += 1
    return depths


def poisson_lognormal(mu: float, sigma: float, most: int) -> NDArray[np.float64]:
    """Return the probabilities of R = 1 … `most` for R = min(most, 1 + Poisson(exp τ)), (most,).

    τ is normal with mean `mu` and standard deviation `sigma`; at `sigma` = 0 it is `mu`.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    log_rate_N = mu + sigma * nodes
    counts_K = np.arange(most - 1)
    log_factorial_K = np.array([math.lgamma(count + 1) for count in counts_K])
    log_p_KN = np.outer(counts_K, log_rate_N) - np.exp(log_rate_N) - log_factorial_K[:, None]
    below = np.exp(log_p_KN) @ (weights / weights.sum())
    found = np.append(below, max(0.0, 1.0 - below.sum()))
    return found / found.sum()


def _mean_reached(sigma: float, mean: float, backward: int) -> float:
    rate = mean - 1 if sigma else mean
    if rate <= 0:
        return min(mean, backward)
    probabilities = poisson_lognormal(math.log(rate) - sigma**2 / 2, sigma, backward + 1)
    first = 1 if sigma else 0  # a plain Poisson draw may be 0, and then one step runs
    steps = np.maximum(np.arange(backward + 1) + first, 1)
    return float(probabilities @ np.minimum(steps, backward))


def recurrent_steps_at(
    config: RecurrenceConfig, *, tokens: int, step: int, seed: int, deepest: int | None = None
) -> int:
    """Return R for one training step, min_steps ≤ R ≤ max_steps, the same on every rank.

    `seed` (≥ 0) and `step` key the draw. `deepest` is the number of steps that the global batch's
    deepest example needs, for `from_data`; None if it is not known.
    """
    if config.from_data and deepest is not None:
        return _clip(deepest, config)
    if not config.poisson:
        return typical_recurrent_steps(config, tokens)
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, step))))
    mean, sigma = config.steps(tokens), config.lognormal_sigma
    if not sigma:
        return _clip(int(generator.poisson(mean)), config)
    rate = (mean - 1) * math.exp(generator.normal(-(sigma**2) / 2, sigma))
    return _clip(1 + int(generator.poisson(rate)), config)


def typical_recurrent_steps(config: RecurrenceConfig, tokens: int) -> int:
    """Return R after `tokens` global tokens; where R is drawn, its mean, rounded and clipped."""
    return _clip(round(config.steps(tokens)), config)


def _clip(steps: int, config: RecurrenceConfig) -> int:
    steps = max(steps, config.min_steps)
    return steps if config.max_steps is None else min(steps, config.max_steps)
