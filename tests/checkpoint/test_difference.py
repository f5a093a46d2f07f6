"""The largest difference of two tensors, and a line for every difference of two checkpoints."""

import math

import pytest
import torch

from tests.checkpoint.small_checkpoint import content
from titan_loop.checkpoint.difference import differences, largest_difference
from titan_loop.checkpoint.tensors import CheckpointReader, write_checkpoint


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


def test_a_line_for_every_difference(tmp_path):
    ones, said = torch.ones(2), content(3)
    write_checkpoint(
        tmp_path / "a",
        {"same": ones, "w": ones, "wide": ones, "low": ones, "mixed": ones, "turned": 1, "old": 1}
        | {"rng": {"a": {"b": 1}}},
        said,
    )
    write_checkpoint(
        tmp_path / "b",
        {"same": ones, "w": ones + 0.5, "wide": torch.ones(3), "low": ones.bfloat16()}
        | {"mixed": 1, "turned": ones, "young": ones, "rng": {"a": {"b": 2}}},
        {**said, "new": 1, "trainer": {**said["trainer"], "tokens": 20}},
    )
    assert [*differences(*(CheckpointReader(tmp_path / name) for name in "ab"))] == [
        "manifest new: None | 1",
        "manifest trainer.tokens: 3000 | 20",
        "low: torch.float32 | torch.bfloat16",
        "mixed: a tensor only in A",
        "old: only in A",
        "rng.a.b: 1 | 2",
        "turned: a tensor only in B",
        "w: largest difference 0.5",
        "wide: shape [2] | [3]",
        "young: only in B",
    ]
