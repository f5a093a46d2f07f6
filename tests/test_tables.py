"""Short texts of counts and durations."""

import pytest

from titan_loop.tables import format_duration, short


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.6, "1m00s"), (750, "12m30s"), (11_100, "3h05m"), (187_200, "2d04h")],
)
def test_durations(seconds: float, text: str):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.7, "1K"),
        (-1968, "-1.97K"),
        (999_700, "1M"),
        (1.3e15, "1.3e+03T"),
    ],
)
def test_counts(count: float, text: str):
    assert short(count) == text
