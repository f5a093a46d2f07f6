import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_loop.data.keyed import KeyedPermutation, keyed_integer, keyed_uniform


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_is_a_bijection_for_any_size_and_key(size, key):
    image = KeyedPermutation(size, key)(np.arange(size))
    assert np.array_equal(np.sort(image), np.arange(size))


@pytest.mark.parametrize(
    ("size", "key", "image"),
    [
        (12, 3, [9, 8, 7, 6, 10, 11, 0, 2, 3, 1, 5, 4]),
        (17, 0, [4, 16, 8, 13, 7, 3, 2, 15, 10, 5, 1, 0, 6, 12, 9, 14, 11]),
    ],
)
def test_the_order_is_that_of_runs_made_before(size, key, image):
    """A checkpoint finds its position by this order, so no version may change it."""
    assert KeyedPermutation(size, key)(np.arange(size)).tolist() == image


def test_draws_are_those_of_runs_made_before():
    assert keyed_integer("a", 1) == 12444202034427101082
    assert keyed_uniform("a", 1) == 0.6746015440287197  # its upper 53 bits over 2**53
    assert keyed_uniform("order", 0, 3) == 0.6377498047023874
