"""Muon on sharded matrices: one rank gathers each, orthogonalises it and sends its parts back.

    B ← μ·B + (1 − μ)·G                   on every rank's part; μ momentum
    U = (1 − μ)·G + μ·B, or B             with Nesterov momentum, or without
    parts of U ─ all-to-all ─► whole matrices, each on its owner
    O = NS(U)                             on the owner
    O ─ all-to-all ─► parts
    W ← (1 − η·λ)·W − η·s·O               on every rank's part; η rate, λ decay

The scale s is max(1, √(rows/columns)) ("original"), or 0.2·√max(rows, columns), which gives O the
root mean square of AdamW's usual update ("match_rms_adamw"). NS is the quintic Newton-Schulz
iteration that brings all singular values near 1:

    X ← U / ‖U‖;   X ← a·X + (b·XXᵀ + c·(XXᵀ)²)·X, five times

It needs whole matrices. Owners are packed so that their products cost about the same; replicas of
HSDP repeat the work. A three-dimensional parameter (experts) is a stack, with an owner a matrix.

Source: Jordan et al. 2024, "Muon", kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv
2502.16982, §2.2 (scale). In one process and bfloat16, it is bit for bit `torch.optim.Muon` of torch
2.13.
"""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from titan_loop.models.initialisation import local_part

RankTable = tuple[tuple[int, ...], ...]
"""Ranks in rows: the ranks of one row hold the parts of a matrix, and every row is a replica."""


class Matrix(NamedTuple):
    """A matrix, or number `number` of a stack; this rank holds the numbers `held`."""

    parameter: Tensor
    number: int
    held: range

    def part(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of the matrix in a tensor like the parameter; a view."""
        local = local_part(tensor)
        if local.ndim == 2:
            return local
        if self.number not in self.held:
            return local.new_empty(0, 0)
        return local[self.number - self.held.start]


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` for matrices and stacks of them, plain or DTensors of any placements.

    The iteration and the exchanges are in `dtype`.
    """

    def __init__(self, params: Iterable[dict[str, Any]], *, dtype: torch.dtype) -> None:
        settings = inspect.signature(torch.optim.Muon).parameters
        defaults = {name: each.default for name, each in settings.items() if name != "params"}
        # Not torch.optim.Muon.__init__, which refuses stacks.
        torch.optim.Optimizer.__init__(self, params, defaults)
        self.dtype = dtype
        layouts: dict[Any, Layout] = {}
        sharing: dict[RankTable, list[tuple[Matrix, list[_Region]]]] = defaultdict(list)
        for group in self.param_groups:
            for parameter in group["params"]:
                # A DTensor's spec has shape, mesh and placements.
                alike = getattr(parameter, "_spec", parameter.shape)
                if alike not in layouts:
                    layouts[alike] = layout(parameter)
                table, regions, held = layouts[alike]
                for number in range(1 if parameter.ndim == 2 else len(parameter)):
                    parts = zip(regions, held, strict=True)
                    here = [part if number in numbers else _NOTHING for part, numbers in parts]
                    matrix = Matrix(parameter, number, held[_place(table)])
                    sharing[table].append((matrix, here))
        self._owners = [MatrixOwners(held, table) for table, held in sharing.items()]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every matrix that has a gradient; collective."""
        assert closure is None
        groups = {matrix: group for group in self.param_groups for matrix in group["params"]}

        def write_direction(matrix: Matrix, part: Tensor) -> None:
            parameter = matrix.parameter
            assert parameter.grad is not None
            state, momentum = self.state[parameter], groups[parameter]["momentum"]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
            gradient = matrix.part(parameter.grad)
            average = matrix.part(state["momentum_buffer"])
            average.lerp_(gradient, 1 - momentum)
            nesterov = groups[parameter]["nesterov"]
            part.copy_(gradient.lerp(average, momentum) if nesterov else average)

        def direction(matrix: Matrix, whole: Tensor) -> Tensor:
            group = groups[matrix.parameter]
            steps, coefficients = group["ns_steps"], group["ns_coefficients"]
            return orthogonalise(whole, steps=steps, coefficients=coefficients, eps=group["eps"])

        for owners in self._owners:
            moves = owners.transform(write_direction, direction, self.dtype)
            for matrix, part in moves:
                parameter = matrix.parameter
                group, local = groups[parameter], matrix.part(parameter)
                local.mul_(1 - group["lr"] * group["weight_decay"])
                scale = _update_scale(parameter.shape[-2:], group["adjust_lr_fn"])
                local.add_(part, alpha=-group["lr"] * scale)


def orthogonalise(
    matrix: Tensor, *, steps: int, coefficients: tuple[float, float, float], eps: float
) -> Tensor:
    """Return NS of a (rows, columns) matrix in its dtype; a norm below `eps` counts as `eps`."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class _Region(NamedTuple):
    top: int
    left: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * self.columns

    def of(self, whole: Tensor) -> Tensor:
        return whole[self.top : self.top + self.rows, self.left : self.left + self.columns]


_NOTHING = _Region(0, 0, 0, 0)


class Layout(NamedTuple):
    """Ranks that hold a matrix or a stack together, and each rank's share.

    For each rank of a row: `regions` has its part of a matrix, `held` its matrices in the stack.
    """

    table: RankTable
    regions: list[_Region]
    held: list[range]


def layout(matrix: Tensor) -> Layout:
    """Return the ranks and parts of a matrix or a stack, from mesh and placements alone."""
    stack = matrix.shape[:-2].numel()
    if not isinstance(matrix, DTensor):
        return Layout(((0,),), [_Region(0, 0, *matrix.shape[-2:])], [range(stack)])
    mesh, placements = matrix.device_mesh, matrix.placements
    cut = [axis for axis, place in enumerate(placements) if not place.is_replicate()]
    whole = [axis for axis in range(mesh.ndim) if axis not in cut]
    ranks = math.prod(mesh.size(axis) for axis in cut)
    rows = mesh.mesh.permute(*whole, *cut).reshape(-1, ranks).tolist()
    regions, held = [], []
    for rank in rows[0]:
        coordinate = (mesh.mesh == rank).nonzero()[0].tolist()
        size, offset = _compute_local_shape_and_global_offset(
            matrix.shape, mesh.shape, coordinate, placements
        )
        regions.append(_Region(*offset[-2:], *size[-2:]))
        first, count = (0, 1) if matrix.ndim == 2 else (offset[0], size[0])
        held.append(range(first, first + count))
    return Layout(tuple(tuple(row) for row in rows), regions, held)


def _place(table: RankTable) -> int:
    if len(table[0]) == 1:
        return 0
    rank = dist.get_rank()
    return next(row.index(rank) for row in table if rank in row)


class MatrixOwners:
    """The owner of every matrix, and the exchanges of parts with it.

    `held` pairs each matrix with its parts on the ranks of a row, in one order on all ranks.
    """

    def __init__(self, held: Sequence[tuple[Matrix, list[_Region]]], table: RankTable) -> None:
        self._matrices = [matrix for matrix, _ in held]
        self._shapes = [tuple(matrix.parameter.shape[-2:]) for matrix in self._matrices]
        size = len(table[0])
        self._group: Any = None  # the group of all ranks
        assert all(row == tuple(sorted(row)) for row in table), "groups number ranks in order"
        self._rank = _place(table)
        if size > 1 and len(table) > 1:
            self._group = shared_group(held[0][0].parameter)
        self._regions = [[regions[rank] for _, regions in held] for rank in range(size)]
        for (matrix, regions), shape in zip(held, self._shapes, strict=True):
            elements = sum(region.size for region in regions)
            assert elements == math.prod(shape), f"ranks hold {elements} of {shape}"
            assert regions[self._rank].size == matrix.part(matrix.parameter).numel()
        # The cost of the iteration's products, in units of 2·steps FLOPs.
        sides = [sorted(shape) for shape in self._shapes]
        owners = pack([short * short * (2 * long + short) for short, long in sides], size)
        self._owned = [
            [i for i, owner in enumerate(owners) if owner == rank] for rank in range(size)
        ]

    def transform(
        self,
        write: Callable[[Matrix, Tensor], None],
        function: Callable[[Matrix, Tensor], Tensor],
        dtype: torch.dtype,
    ) -> list[tuple[Matrix, Tensor]]:
        """Apply a function of whole matrices to sharded ones; return this rank's parts; collective.

        `write` fills this rank's part of each matrix that has a gradient. `function` maps each
        whole matrix that this rank owns to one of the same shape.
        """
        chosen = [
            [i for i in owned if self._matrices[i].parameter.grad is not None]
            for owned in self._owned
        ]
        sent = [(self._rank, i) for owned in chosen for i in owned]
        parts, views = self._buffer(sent, dtype)
        # Into the buffer itself, which is sorted by owner, as the collective wants it.
        for (_, index), view in zip(sent, views, strict=True):
            write(self._matrices[index], view)
        mine = chosen[self._rank]
        arriving = [(rank, i) for rank in range(len(chosen)) for i in mine]
        arrived, arrivals = self._buffer(arriving, dtype)
        sent_sizes = [self._total(self._rank, owned) for owned in chosen]
        arrived_sizes = [self._total(rank, mine) for rank in range(len(chosen))]
        self._exchange(arrived, parts, arrived_sizes, sent_sizes)
        for index in mine:  # one at a time: only one whole matrix exists beside the parts
            whole = arrived.new_empty(self._shapes[index])
            pieces = [
                (self._regions[rank][index].of(whole), view)
                for (rank, i), view in zip(arriving, arrivals, strict=True)
                if i == index
            ]
            for place, piece in pieces:
                place.copy_(piece)
            # Back into `whole`: the places are views of it, and the function returns a new tensor.
            whole.copy_(function(self._matrices[index], whole))
            for place, piece in pieces:
                piece.copy_(place)
        # Back the way they came, into the buffers that they left from: the sizes are those of the
        # first exchange with the two sides swapped, and `views` still cut `parts` rightly.
        self._exchange(parts, arrived, sent_sizes, arrived_sizes)
        return [(self._matrices[index], view) for (_, index), view in zip(sent, views, strict=True)]

    def _buffer(
        self, pieces: list[tuple[int, int]], dtype: torch.dtype
    ) -> tuple[Tensor, list[Tensor]]:
        """Return a flat buffer for parts, each a rank and a matrix, and a view of each."""
        regions = [self._regions[rank][index] for rank, index in pieces]
        sizes = [region.size for region in regions]
        flat = torch.empty(sum(sizes), dtype=dtype, device=self._matrices[0].parameter.device)
        views = [
            part.view(region.rows, region.columns)
            for part, region in zip(flat.split(sizes), regions, strict=True)
        ]
        return flat, views

    def _total(self, rank: int, indices: list[int]) -> int:
        return sum(self._regions[rank][index].size for index in indices)

    def _exchange(
        self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]
    ) -> None:
        if len(self._regions) == 1:
            received.copy_(sent)
        else:
            dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self._group)


def shared_group(matrix: Tensor) -> Any:
    """Return the group of the ranks that share a matrix; the mesh keeps it."""
    assert isinstance(matrix, DTensor)
    mesh, names = matrix.device_mesh, matrix.device_mesh.mesh_dim_names
    assert names is not None
    cut = [axis for axis, place in enumerate(matrix.placements) if not place.is_replicate()]
    return mesh[tuple(names[axis] for axis in cut)]._flatten().get_group()


def pack(costs: Sequence[float], bins: int) -> list[int]:
    """Return a bin for every cost; the largest come first, each into the least filled bin."""
    filled, chosen = [0.0] * bins, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        chosen[index] = min(range(bins), key=lambda number: filled[number])
        filled[chosen[index]] += costs[index]
    return chosen


def _update_scale(shape: torch.Size, rule: str) -> float:
    rows, columns = shape
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
