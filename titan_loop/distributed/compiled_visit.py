"""A visit of several layers as one compiled graph.

    h ← layer_N(… layer_1(h) …)

The host enters it once a visit, not once a layer. Layers of one kind share their code, so that
compiling takes little longer than for one of them.
"""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from titan_loop.models.context import LoopContext
from titan_loop.models.decoder import Visit
from titan_loop.models.joined import Joined

MOST_KINDS = 256
"""Kinds of layers in a visit, and of visits, above which the compiler fails; its default is 8, and
no function may have more."""


def can_share_code() -> bool:
    """Return whether this torch compiles layers of one kind once; 2.11 does not."""
    return "max_reuse_entries" in signature(torch.compiler.nested_compile_region).parameters


def compiled_visit(backend: str) -> Visit:
    """Return the function that applies layers in turn, compiled for each kind of its arguments."""
    # Autograd, to which "eager" leaves the gradients, has none of a region.
    layer_of_a_kind: Any = _layer
    if backend != "eager" and can_share_code():
        layer_of_a_kind = torch.compiler.nested_compile_region(_layer, max_reuse_entries=MOST_KINDS)

    def visit(
        layers: Sequence[nn.Module],
        joined: Sequence[Joined | None],
        hidden_BLD: Tensor,
        context: LoopContext,
    ) -> Tensor:
        for layer, matrices in zip(layers, joined, strict=True):
            hidden_BLD = layer_of_a_kind(layer, matrices, hidden_BLD, context)
        return hidden_BLD

    # In torch 2.13 sizes that become symbolic, such as the width and window of a second model, fail
    # with a KeyError in shared layers. Its overloads lack the limit.
    options: Any = {"dynamic": False, "recompile_limit": MOST_KINDS}
    return torch.compile(visit, backend=backend, fullgraph=True, **options)


def _layer(
    layer: nn.Module, joined: Joined | None, hidden_BLD: Tensor, context: LoopContext
) -> Tensor:
    more: dict[str, Any] = {} if joined is None else {"joined": joined}
    return layer(hidden_BLD, context, None, **more)
