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
def at_layer_visits(model: LoopDecoder, act: Act, *, embedding: bool = False) -> Iterator[None]:
    """Call `act` after every looped layer of every recurrent step of the one forward pass inside.

    The state is the layer's output, before any norm between steps. Layers outside the loop run, but
    `act` does not see them.

    Args:
        model: Whole, on one device; not compiled.
        embedding: Whether to call `act` first for the tokens' embeddings, as step 0 and layer 0.
    """
    visits: Counter[int] = Counter()

    def hook_of(layer: int) -> Callable[..., Tensor | None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
            visits[layer] += 1
            if layer:
                return act(visits[layer], layer, output)
            # A family whose steps hand on tokens looks them up again in every step.
            return act(0, 0, output) if visits[layer] == 1 else None

        return hook

    shown = [*enumerate(model.looped_layers(), start=1)]
    if embedding:
        shown.append((0, model.tok_embeddings))
    hooks = [module.register_forward_hook(hook_of(number)) for number, module in shown]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()
