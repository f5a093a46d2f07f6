"""Sizes of units: their parameters, and the elements that FSDP leaves on a rank."""

import pytest
from torch import nn

from titan_loop.models.units import Unit, UnitSize, innermost_first, sharded_axis, unit_sizes_of


@pytest.mark.parametrize(
    ("shape", "degree", "axis"),
    [
        ((8,), 4, 0),
        ((2, 8), 4, 0),
        ((4, 8, 6), 4, 0),  # as many matrices as ranks
        ((3, 8, 6), 4, 1),
        ((3, 9, 6), 4, 0),  # rows cannot be cut evenly
        ((3, 8, 6), 2, 0),
    ],
)
def test_a_stack_of_too_few_matrices_is_cut_by_rows(shape, degree, axis):
    assert sharded_axis(shape, degree) == axis


def test_elements_on_a_rank_are_padded():
    size = UnitSize(
        Unit("layers"), {"a": (5, 3), "b": (3, 8, 2), "exit_gate.weight": (1, 7), "gate": (2,)}
    )
    assert size.parameters() == 15 + 48 + 7 + 2
    assert size.parameters("gate") == 7
    assert size.shard(1) == 72
    # Two of five rows; two of eight rows in three matrices; the only row; one of two.
    assert size.shard(4) == 2 * 3 + 3 * 2 * 2 + 7 + 1
    assert size.shard(4, "gate") == 7


def test_a_parameter_belongs_to_its_innermost_unit():
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4, bias=False)))
    outer, inner = Unit("outer", (model,)), Unit("inner", (model[1][0],))
    assert innermost_first(model, [outer, inner]) == [inner, outer]
    sizes = unit_sizes_of(model, [outer, inner])
    assert [(size.unit.name, size.unit.modules) for size in sizes] == [("outer", ()), ("inner", ())]
    assert sizes[0].shapes == {"0.weight": (3, 2), "0.bias": (3,)}
    assert sizes[1].shapes == {"1.0.weight": (4, 3)}
    with pytest.raises(AssertionError, match=r"Sequential.units\(\) has no unit for .*0.bias"):
        unit_sizes_of(model, [inner])
