"""Comparing the records of two runs in `metrics.jsonl`."""

from collections.abc import Sequence
from typing import Any

import pytest

RELATIVE_TOLERANCE = 1e-5
"""Ranks sum their shares of a loss in another order than one process does. In the gate stage k = 50
multiplies the effect on a difference of two cross entropies; measured 1e-6."""

MEASURED = ("tokens_per_second", "peak_memory_bytes", "data_wait")


def assert_same_records(got: Sequence[dict[str, Any]], want: Sequence[dict[str, Any]]) -> None:
    """Compare all that is not measured: floats within `RELATIVE_TOLERANCE`, the rest exactly."""
    for record, expected in zip(got, want, strict=True):
        assert record.keys() == expected.keys()
        for key in expected.keys() - set(MEASURED):
            value = expected[key]
            if isinstance(value, float):
                value = pytest.approx(value, rel=RELATIVE_TOLERANCE)
            assert record[key] == value, key
