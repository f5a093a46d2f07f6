"""States after every layer visit of one forward pass, to be kept or replaced."""

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

    The state is the layer's output, before any norm between steps. Layers outside the loop run, but
    `act` does not see them. The model is whole, on one device, and not compiled.
    """
    visits: Counter[int] = Counter()

    def hook_of(layer: int) -> Callable[..., Tensor | None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
            visits[layer] += 1
            return act(visits[layer], layer, output)

        return hook

    shown = enumerate(model.looped_layers(), start=1)
    hooks = [module.register_forward_hook(hook_of(number)) for number, module in shown]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()
