"""The treatment of a parameter follows from its shape and its module."""

import pytest
import torch
from torch import nn

from titan_loop.models.parameter_groups import LookUp, ParameterGroup, default_group


class Table(nn.Module, LookUp):
    pass


LINEAR, EMBEDDING = nn.Linear(1, 1), nn.Embedding(1, 1)
HIDDEN = ParameterGroup(decays=True, is_hidden_matrix=True, width_ratio=4.0)
MATRIX, VECTOR = ParameterGroup(decays=True), ParameterGroup(decays=False)


@pytest.mark.parametrize(
    ("name", "shape", "owner", "group"),
    [
        ("layers.0.w.weight", (2, 3), LINEAR, HIDDEN),
        ("layers.0.w.weight", (2, 2), LINEAR, HIDDEN),
        ("layers.0.w.weight", (1, 3), LINEAR, VECTOR),
        ("layers.0.w.weight", (3, 1), LINEAR, VECTOR),
        ("layers.0.w.bias", (3,), LINEAR, VECTOR),
        ("layers.0.w.bias", (2, 3), LINEAR, VECTOR),
        ("layers.0.norm.weight", (3,), nn.RMSNorm(3), VECTOR),
        ("scale", (), LINEAR, VECTOR),
        ("experts.w1", (4, 2, 3), LINEAR, MATRIX),
        ("experts.w1", (1, 2, 3), LINEAR, MATRIX),
        ("tok_embeddings.weight", (8, 3), EMBEDDING, MATRIX),
        ("positions.weight", (8, 3), Table(), MATRIX),
        ("lm_head.weight", (8, 3), LINEAR, ParameterGroup(decays=True, width_ratio=4.0)),
    ],
)
def test_a_parameters_group(name, shape, owner, group):
    assert default_group(name, torch.empty(shape), owner, width_ratio=4.0) == group
