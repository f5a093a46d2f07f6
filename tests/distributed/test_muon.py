"""Muon in one process: torch's own, bit for bit, and the iteration against singular values."""

from typing import Any

import pytest
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_loop.distributed.muon import Layout, Muon, layout, orthogonalise, pack

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SHAPES = [(24, 8), (8, 24), (16, 16), (1, 5)]


def matrices() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def trained(build: Any, settings: dict[str, Any]) -> list[Tensor]:
    """Return the matrices after five steps with the same random gradients; one has none first."""
    parameters = matrices()
    optimizer = build([{"params": parameters, "lr": 0.02, "weight_decay": 0.3, **settings}])
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if step == 0 and parameter is parameters[1] else gradient
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_one_process_in_bfloat16_is_torch_s_own_bit_for_bit(scale, nesterov):
    settings = {"adjust_lr_fn": scale, "nesterov": nesterov, "momentum": 0.9}
    ours = trained(lambda groups: Muon(groups, dtype=torch.bfloat16), settings)
    theirs = trained(torch.optim.Muon, settings)
    for got, want in zip(ours, theirs, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_iteration_maps_singular_values_and_keeps_vectors(shape):
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    a, b, c = COEFFICIENTS
    for _ in range(3):
        values = a * values + b * values**3 + c * values**5
    got = orthogonalise(matrix, steps=3, coefficients=COEFFICIENTS, eps=1e-7)
    torch.testing.assert_close(got, left @ values.diag() @ right)


def test_owners_share_the_cost():
    assert pack([1, 5, 3, 3, 2], 2) == [1, 0, 1, 1, 0]
    assert pack([1.0], 3) == [0]


MESHES: list[tuple[tuple[int, ...], list[Placement], tuple[int, int]]] = [
    ((8,), [Shard(0)], (20, 6)),  # some ranks hold nothing
    ((2, 4), [Replicate(), Shard(0)], (20, 6)),
    ((4, 2), [_StridedShard(0, split_factor=2), Shard(0)], (20, 6)),
    ((4, 2), [Shard(0), Shard(1)], (21, 6)),
    ((4, 2), [Shard(0), Replicate()], (5, 6)),
]


def seen_by(
    rank: int, mesh_shape: tuple[int, ...], placements: list[Placement], shape: tuple[int, int]
) -> tuple[Layout, tuple[int, ...]]:
    """Return the layout that a rank computes, and where torch says that its own part is."""
    dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", mesh_shape)
        size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        whole = {"shape": torch.Size(shape), "stride": (shape[1], 1)}
        local = torch.empty(size)
        matrix = DTensor.from_local(local, mesh, placements, run_check=False, **whole)
        return layout(matrix), (*offset, *size)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("mesh_shape", "placements", "shape"), MESHES)
def test_every_rank_computes_what_all_others_hold(mesh_shape, placements, shape):
    seen = [seen_by(rank, mesh_shape, placements, shape) for rank in range(8)]
    (table, regions, held), _ = seen[0]
    assert all(found == (table, regions, held) for found, _ in seen)
    assert held == [range(1)] * len(regions)
    for row in table:
        assert [seen[rank][1] for rank in row] == [tuple(region) for region in regions]
