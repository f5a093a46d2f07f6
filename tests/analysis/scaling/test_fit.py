"""Fits: planted coefficients come back from exact and from noisy losses."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.analysis.scaling.planted import (
    BASE,
    BY_POWER,
    GAINS,
    PLANTED,
    SIZES,
    TOKENS,
    additive,
    by_gain,
    joint,
    losses,
)
from titan_loop.analysis.scaling.fit import Fit, bootstrap, fit
from titan_loop.analysis.scaling.law import (
    ADDITIVE,
    DENSE,
    POWER,
    SPARSE,
    Law,
    Losses,
    with_repeats,
)
from titan_loop.analysis.scaling.published import PUBLISHED

NOISE = 0.01  # nats; twice the spread of three seeds of the quick start


@pytest.mark.parametrize(
    ("law", "reference", "planted"),
    [
        (ADDITIVE, additive, PLANTED),
        (POWER, joint, BY_POWER),
        (DENSE["linear"], by_gain("linear"), BASE | GAINS["linear"]),
        (DENSE["bounded"], by_gain("bounded"), BASE | GAINS["bounded"]),
    ],
)
def test_planted_coefficients_are_recovered(law: Law, reference, planted: dict[str, float]):
    points = losses(reference)
    fitted = fit(law, points)
    assert {n: v / planted[n] for n, v in fitted.values.items()} == pytest.approx(
        dict.fromkeys(planted, 1.0), rel=0.02
    )
    assert fitted.r_squared(points) == pytest.approx(1, abs=1e-9)
    assert Fit(law, planted, 0.0).predict(points) == pytest.approx(points.loss, rel=1e-12)


def test_phi_is_recovered_from_noisy_losses_and_lies_in_its_interval():
    points = losses(joint, noise=NOISE)
    fitted = bootstrap(fit(POWER, points), points, samples=40)
    assert fitted.values["phi"] == pytest.approx(BY_POWER["phi"], abs=0.03)
    low, high = fitted.intervals["phi"]
    assert low < fitted.values["phi"] < high
    assert high - low < 0.2
    assert fitted.rmse == pytest.approx(NOISE, rel=0.15)


def test_the_published_law_with_experts_is_recovered_from_its_own_losses():
    law, values = SPARSE["bounded"], PUBLISHED["loop-moe"]["coefficients"]
    grid = np.array(list(itertools.product(SIZES, TOKENS[::4], (1, 2, 4, 8), (1, 2, 4, 8, 16))))
    points = Losses(
        parameters=grid[:, 0],
        looped=0.8 * grid[:, 0],
        total=grid[:, 0] * (1 + 2 / 3 * (grid[:, 3] - 1)),
        experts=grid[:, 3],
        tokens=grid[:, 1],
        unique=grid[:, 1],
        steps=grid[:, 2],
        loss=np.ones(len(grid)),
        run=np.array([str(row) for row in grid]),
        width=grid[:, 0],
    )
    points = replace(points, loss=law.predict(values, points))
    fitted = fit(law, points)
    assert {n: v / values[n] for n, v in fitted.values.items()} == pytest.approx(
        dict.fromkeys(values, 1.0), rel=1e-3
    )


def test_tokens_read_again_count_for_less():
    """Muennighoff et al., Eq. 5, written out for one point; then fitted."""
    points = replace(losses(joint), unique=np.minimum(losses(joint).tokens, 4e9))
    law, values = with_repeats(POWER), {**BY_POWER, "reuse": 15.4}
    counted = 4e9 + 4e9 * 15.4 * (1 - np.exp(-(20e9 / 4e9 - 1) / 15.4))
    assert law.predict(values, points)[-1] == pytest.approx(joint(SIZES[-1], counted, 8), rel=1e-12)
    points = replace(points, loss=law.predict(values, points))
    assert fit(law, points).values["reuse"] == pytest.approx(15.4, rel=0.01)


def test_r_squared_is_that_of_the_definition():
    points = losses(additive, noise=0.05)
    fitted = fit(ADDITIVE, points)
    predicted = np.array(
        [
            fitted.values["E"]
            + fitted.values["A"] / (n + fitted.values["t1"]) ** fitted.values["alpha"]
            + fitted.values["B"] / (d + fitted.values["t2"]) ** fitted.values["beta"]
            + fitted.values["C"] / (r + fitted.values["t3"]) ** fitted.values["gamma"]
            for n, d, r in zip(points.parameters, points.tokens, points.steps, strict=True)
        ]
    )
    expected = 1 - ((points.loss - predicted) ** 2).sum() / (len(points) * points.loss.var())
    assert fitted.r_squared(points) == pytest.approx(expected, rel=1e-9)
