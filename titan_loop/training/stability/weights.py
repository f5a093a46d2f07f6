"""Norms of every layer's weights, their gradient, and the update that a training step makes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


class WeightNorms(NamedTuple):
    """Norms by part of the model: "0", "1", … for layers, or the name of another module.

    Attributes:
        gradient: Norm of the gradient before clipping; 0 where none arrived.
        weight: Norm of the weights before the update.
        update: Norm of the weights' change; 0 if the update was skipped.
    """

    gradient: dict[str, Tensor]
    weight: dict[str, Tensor]
    update: dict[str, Tensor]


@contextmanager
def measured_update(model: nn.Module) -> Iterator[WeightNorms]:
    """Measure the update inside; collective, and the values stay on the device.

    Needs memory for one more copy of this rank's weights until the end of the block.

    Args:
        model: Its gradients are there, not clipped yet.

    Yields:
        The norms; `update` is filled at the end of the block.
    """
    parts = parts_of(model)
    before = {name: [p.detach().clone() for p in part] for name, part in parts.items()}
    norms = WeightNorms(
        gradient={
            name: _norm([p.grad if p.grad is not None else torch.zeros_like(p) for p in part])
            for name, part in parts.items()
        },
        weight={name: _norm(weights) for name, weights in before.items()},
        update={},
    )
    yield norms
    with torch.no_grad():
        for name, part in parts.items():
            old = before.pop(name)
            norms.update[name] = _norm([p - q for p, q in zip(part, old, strict=True)])


def parts_of(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the parameters that train, by layer number or by the module that they stand in."""
    parts: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            first, second, *_ = [*name.split("."), ""]
            parts.setdefault(second if first == "layers" else first, []).append(parameter)
    return parts


def _norm(tensors: list[Tensor]) -> Tensor:
    """Return the 2-norm of all of them, the same on all ranks."""
    norm = get_total_norm([tensor.detach() for tensor in tensors])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
