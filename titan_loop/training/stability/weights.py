"""Norms of every layer's weights, their gradient, and the update that a training step makes."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


class WeightNorms:
    """Norms by part of the model: "0", "1", … for layers, or the name of another module.

    Create it between the backward pass and clipping, and `finish` it after the update: meanwhile it
    holds one more copy of this rank's weights. Collective; the values stay on the device.

    Attributes:
        gradient: Norm of the gradient before clipping; 0 where none arrived.
        update: Norm of the weights' change, once finished; 0 if the update was skipped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parts = parts_of(model)
        self._before = {
            name: [p.detach().clone() for p in part] for name, part in self._parts.items()
        }
        self.gradient = {
            name: _norm([p.grad if p.grad is not None else torch.zeros_like(p) for p in part])
            for name, part in self._parts.items()
        }
        self.weight = {name: _norm(weights) for name, weights in self._before.items()}
        self.update: dict[str, Tensor] = {}

    @torch.no_grad()
    def finish(self) -> None:
        """Measure the update and drop the copies."""
        for name, part in self._parts.items():
            old = self._before.pop(name)
            self.update[name] = _norm([p - q for p, q in zip(part, old, strict=True)])


def parts_of(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the trainable parameters by layer number or top-level module."""
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
