"""Intervals over questions and seeds: textbook values, and coverage where they are used."""

import numpy as np
import pytest
from scipy.stats import binomtest, ttest_1samp

from titan_loop.evaluation.intervals import of_questions, of_seeds


@pytest.mark.parametrize(("right", "questions"), [(0, 40), (7, 39), (39, 39), (500, 1000), (1, 1)])
def test_questions_have_wilsons_interval(right: int, questions: int):
    expected = binomtest(right, questions).proportion_ci(method="wilson")
    found = of_questions(right / questions, questions)
    assert found == pytest.approx((right / questions, expected.low, expected.high), abs=1e-6)
    assert found.low <= found.value <= found.high


def test_seeds_have_students_interval():
    values = [0.184, 0.148, 0.087]
    expected = ttest_1samp(values, 0).confidence_interval(0.95)
    assert of_seeds(values) == pytest.approx((np.mean(values), expected.low, expected.high))
    assert of_seeds([0.5]) == (0.5, 0.5, 0.5)
    assert of_seeds([0.5], 0.01**2) == pytest.approx((0.5, 0.4804, 0.5196))
