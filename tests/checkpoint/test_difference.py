"""The largest difference of two tensors, and a line for every difference of two checkpoints."""

import math
from typing import Any

import pytest
import torch

from titan_loop.checkpoint.difference import differences, largest_difference


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
