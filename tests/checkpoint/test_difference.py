"""The largest difference, against a loop over the elements in plain Python."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_loop.checkpoint.difference import differences, largest_difference

numbers = st.one_of(
    st.floats(width=32), st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0])
)


def reference(a: list[float], b: list[float]) -> float:
    apart = [
        abs(x - y)
        for x, y in zip(a, b, strict=True)
        if x != y and not (math.isnan(x) and math.isnan(y))
    ]
    return max((x if math.isfinite(x) else math.inf for x in apart), default=0.0)


@given(pairs=st.lists(st.tuples(numbers, numbers), max_size=12))
def test_against_python(pairs):
    a, b = ([pair[side] for pair in pairs] for side in (0, 1))
    found = largest_difference(torch.tensor(a), torch.tensor(b))
    assert found == pytest.approx(reference(a, b), rel=1e-12)


class Checkpoint:
    """What a reader gives of a checkpoint in memory."""

    def __init__(self, **entries: Any) -> None:
        self.manifest = {"step": 1}
        self.entries = entries

    def keys(self):
        return self.entries.keys()

    def tensor_keys(self):
        return [key for key, value in self.entries.items() if isinstance(value, torch.Tensor)]

    def shape(self, key):
        return self.entries[key].shape

    def dtype(self, key):
        return self.entries[key].dtype

    def read(self, key):
        return self.entries[key]

    def read_object(self, key):
        return self.entries[key]


def test_every_difference_of_two_checkpoints_is_a_line():
    same = {"equal": torch.ones(2), "note": {"a": 1}}
    a: Any = Checkpoint(
        **same, added=1, kind=2, shape=torch.ones(2, 3), dtype=torch.ones(2), value=3,
        moved=torch.tensor([1.0, 4.0]),
    )  # fmt: skip
    b: Any = Checkpoint(
        **same, kind=torch.ones(1), shape=torch.ones(3, 2), dtype=torch.ones(2).double(),
        value=4, moved=torch.tensor([1.0, 5.0]), extra=torch.ones(1),
    )  # fmt: skip
    assert [*differences(a, b)] == [
        "added: only in A",
        "dtype: torch.float32 | torch.float64",
        "extra: only in B",
        "kind: a tensor only in B",
        "moved: largest difference 1",
        "shape: shape [2, 3] | [3, 2]",
        "value: 3 | 4",
    ]
    assert "kind: a tensor only in A" in [*differences(b, a)]
    a.manifest = {"step": 3, "files": 1, "trainer": {"tokens": 10, "R": 4}, "data": {"files": 1}}
    b.manifest = {"step": 3, "files": 2, "trainer": {"tokens": 20, "R": 4}, "data": {"files": 2}}
    assert [*differences(a, b)][:2] == [
        "manifest data.files: 1 | 2",
        "manifest trainer.tokens: 10 | 20",
    ]
