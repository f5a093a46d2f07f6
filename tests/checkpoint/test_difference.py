"""The largest difference of two tensors, and a line for every difference of two checkpoints."""

import math
from typing import Any, cast

import pytest
import torch

from titan_loop.checkpoint.difference import differences, largest_difference
from titan_loop.checkpoint.tensors import CheckpointReader


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


class InMemory:
    """What a reader gives of a checkpoint."""

    def __init__(self, manifest: dict[str, Any], **entries: Any) -> None:
        self.manifest, self._entries = manifest, entries

    def keys(self):
        return self._entries.keys()

    def tensor_keys(self):
        return [key for key, value in self._entries.items() if isinstance(value, torch.Tensor)]

    def shape(self, key: str):
        return tuple(self._entries[key].shape)

    def dtype(self, key: str):
        return self._entries[key].dtype

    def read(self, key: str):
        return self._entries[key]

    read_object = read


def test_a_line_for_every_difference():
    ones = torch.ones(2)
    manifest = {"step": 3, "sha256": "0", "trainer": {"tokens": 10, "R": 4}}
    a = InMemory(
        manifest, same=ones, w=ones, wide=ones, low=ones, mixed=ones, rng={"a": {"b": 1}}, old=1
    )
    b = InMemory(
        {"step": 3, "sha256": "1", "trainer": {"tokens": 20, "R": 4}, "new": 1},
        same=ones,
        w=ones + 0.5,
        wide=torch.ones(3),
        low=ones.bfloat16(),
        mixed=1,
        rng={"a": {"b": 2}},
        young=ones,
    )
    assert [*differences(cast("CheckpointReader", a), cast("CheckpointReader", b))] == [
        "manifest new: None | 1",
        "manifest trainer.tokens: 10 | 20",
        "low: torch.float32 | torch.bfloat16",
        "mixed: a tensor only in A",
        "old: only in A",
        "rng.a.b: 1 | 2",
        "w: largest difference 0.5",
        "wide: shape [2] | [3]",
        "young: only in B",
    ]
