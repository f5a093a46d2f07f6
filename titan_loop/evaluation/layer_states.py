"""What every layer visit of one forward pass leaves: to be kept, or put in its place."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from titan_loop.models.decoder import LoopDecoder

Act = Callable[[int, int, Tensor], Tensor | None]
"""(step from 1, looped layer from 1, state (B, L, D)) → state to go on with; None for the same."""


@contextmanager
def at_layer_visits(model: LoopDecoder, act: Act) -> Iterator[None]:
    """Call `act` after every looped layer of every recurrent step of the one forward pass inside.

    The state is what a layer hands to the next, before any norm between steps.

    Args:
        model: Whole, on one device; not compiled.
        act: What to do.
    """
    visits: Counter[int] = Counter()

    def hook_of(layer: int) -> Callable[..., Tensor | None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
            visits[layer] += 1
            return act(visits[layer], layer, output)

        return hook

    hooks = [
        layer.register_forward_hook(hook_of(number))
        for number, layer in enumerate(model.looped_layers(), start=1)
    ]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()
