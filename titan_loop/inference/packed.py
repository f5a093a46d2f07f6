"""Matrices in oneDNN's layout, for products of few rows on a CPU.

A plain product lays its matrix out anew: with 16 rows that takes half of its time. The model then
holds its matrices twice.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.common.linear import Linear

from titan_loop.models.readout import LMHead

SMALLEST = 2**18
"""Elements of a matrix below which a plain product is as fast."""


def pack(model: nn.Module) -> bool:
    """Let a model on a CPU multiply by copies of its matrices in fp32, where it needs no gradients.

    Returns whether it has such matrices.

    Call it again after they change: until then they are multiplied by as they are. A packed model
    cannot be copied or saved whole; its state dict can.
    """
    packs = False
    for linear in model.modules():
        if not isinstance(linear, Linear) or not _gains(linear):
            continue
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 16)
        product: Any = partial(_product, linear, packed, linear.weight, linear.weight._version)
        if isinstance(linear, LMHead):
            product = partial(_logits, linear, product)
        linear.forward = product
        packs = True
    return packs


def _gains(linear: Linear) -> bool:
    weight = linear.weight
    plain = type(linear) in (Linear, LMHead)  # quantised or adapted ones do more
    plain &= weight.device.type == "cpu" and weight.dtype == torch.float32
    plain &= not weight.is_inference()  # whose changes cannot be seen
    return plain and weight.numel() >= SMALLEST and torch.backends.mkldnn.is_available()


def _product(linear: Linear, packed: Tensor, weight: Tensor, version: int, x: Tensor) -> Tensor:
    changed = linear.weight is not weight or weight._version != version
    traced = type(x) is not Tensor
    if changed or traced or torch.is_grad_enabled() or x.dtype != torch.float32:
        return Linear.forward(linear, x)
    return torch.ops.mkldnn._linear_pointwise(x, packed, linear.bias, "none", [], "")


def _logits(head: LMHead, product: Any, states: Any, **labels: Any) -> Any:
    if isinstance(states, Tensor):
        return head.shaped(product(states))
    return LMHead.forward(head, states, **labels)
