"""The plot of experts' loads: values by visit, its message, and the visits it leaves out."""

from typing import Any

import numpy as np
import pytest

from titan_loop.families.moe.load_plot import PREFIX, read_loads

EQUAL = [1.0, 1.0, 1.0, 1.0]


def records(number: int = 40, visits: int = 2) -> list[dict[str, Any]]:
    """Return loads of layer 1, and of layer 2 at its steps; the last step ends halfway."""
    made: list[dict[str, Any]] = []
    for step in range(1, number + 1):
        busy = 1.0 + step / number
        record = {"step": step, "tokens": 100 * step, f"{PREFIX}layer_1": EQUAL}
        for visit in range(1, visits + 1):
            if visit < visits or step <= number // 2:
                record[f"{PREFIX}layer_2_step_{visit}"] = [busy, 0.0, 1.0, 3.0 - busy]
        made.append(record)
    return made


def test_loads_are_ordered_by_layer_and_step():
    loads = read_loads(records(visits=11))
    assert [visit.name for visit in loads] == [
        "layer 1",
        *(f"layer 2, step {step}" for step in range(1, 12)),
    ]
    assert loads[1].values.shape == (40, 4)
    assert loads[1].last == pytest.approx([1.9625, 0.0, 1.0, 1.0375])  # records 37 to 40
    assert np.isnan(loads[-1].last).all()
    assert np.isnan(loads[-1].values).all(1).tolist() == [False] * 20 + [True] * 20
