"""The largest difference of two tensors, and a line for every difference of two checkpoints."""

import math

import pytest
import torch

from titan_loop.checkpoint.difference import largest_difference


@pytest.mark.parametrize(
    ("a", "b", "most"),
    [
        ([1.0, -2.0, 3.0], [1.0, 2.0, 3.5], 4.0),
        ([math.nan, math.inf, -0.0], [math.nan, math.inf, 0.0], 0.0),
        ([math.nan, 1.0], [1.0, 1.0], math.inf),
        ([math.inf], [-math.inf], math.inf),
        ([], [], 0.0),
    ],
)
def test_the_largest_difference(a: list[float], b: list[float], most: float):
    assert largest_difference(torch.tensor(a), torch.tensor(b)) == most
