"""Random initial weights that do not depend on the model's sharding.

Every rank draws the whole matrix from the same generator state and keeps its shard. On CPU, which
has no DTensor generator, shards that are drawn directly would be the same on all ranks.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate


def normal_matrix(parameter: torch.Tensor, *, std: float) -> None:
    """Fill a matrix from a normal distribution truncated at three standard deviations."""
    draw(parameter, fill=partial(nn.init.trunc_normal_, std=std, a=-3 * std, b=3 * std))


def draw(parameter: torch.Tensor, *, fill: Callable[[torch.Tensor], object]) -> None:
    """Overwrite a tensor with `fill`; of a sharded one, fill the whole and keep this shard."""
    if not isinstance(parameter, DTensor):
        fill(parameter)
        return
    local = parameter.to_local()
    whole = torch.empty(parameter.shape, dtype=local.dtype, device=local.device)
    fill(whole)
    keep_shard(parameter, whole)


def keep_shard(parameter: DTensor, whole: torch.Tensor) -> None:
    """Overwrite a sharded parameter with this rank's part of `whole`, which every rank holds."""
    parameter.to_local().copy_(local_part(placed_like(whole, parameter)))


def placed_like(whole: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that every rank holds whole, with the placements of `x`."""
    if not isinstance(x, DTensor):
        return whole
    mesh = x.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=x.placements)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, sharded or plain; a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
