"""The repeated application of the stack, and the carry between two recurrent steps.

    carry_1 = start(tokens)
    h_r     = step(carry_r) = norm(layers(input(carry_r))),   norm if it ends every step
    carry_{r+1} = advance(carry_r, h_r)

The *carry* is the starting point of a step: the state alone in Ouro, state and embedding with input
injection. The decoder defines it in `start`, `input` and `advance`; recurrence and engine do not
know its structure.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from titan_loop.models.context import LoopContext

Carry: TypeAlias = Any
"""A pytree of tensors (B, L, …): the engine can keep, drop and append rows and tokens."""

Part: TypeAlias = Callable[..., Any]
"""A part of the forward pass that is recomputed as a whole, such as (carry_r, r, context) → h_r."""


class Recurrence:
    """The loop over recurrent steps, with truncated gradients and recomputation.

    `recurrent_steps` and `backward_steps` are R and k of the latest pass, for families whose step
    or readout depends on them. `wrap(step)` runs in place of every step, such as to recompute it.
    """

    def __init__(self) -> None:
        self.recurrent_steps = 0
        self.backward_steps: int | None = None
        self.wrap: Callable[[Part], Part] | None = None

    def wrapped(self, part: Part) -> Part:
        """Return a step, or the layers before or after the loop, in the form that is run."""
        return part if self.wrap is None else self.wrap(part)

    def run(
        self,
        model: Any,
        carry: Carry,
        recurrent_steps: int,
        context: LoopContext,
        backward_steps: int | None = None,
    ) -> Iterator[Tensor]:
        """Yield the state after each of the steps 1 … R of a `LoopDecoder`.

        Steps before the last `backward_steps`, and the advances between them, record nothing for
        the backward pass: their results are constants. Parts of a carry that come unchanged from
        the start keep their gradient.
        """
        self.recurrent_steps, self.backward_steps = recurrent_steps, backward_steps
        run_step: Callable[..., Tensor] = self.wrapped(model.step)
        recorded_from = 1
        if backward_steps is not None:
            recorded_from = recurrent_steps - backward_steps + 1
        hidden_BLD: Tensor | None = None
        for step in range(1, recurrent_steps + 1):
            # Left before the yield: a suspended generator would leave its caller in this mode.
            with torch.set_grad_enabled(torch.is_grad_enabled() and step >= recorded_from):
                if hidden_BLD is not None:
                    carry = model.advance(carry, hidden_BLD, step - 1, context)
                hidden_BLD = run_step(carry, step, context)
            yield hidden_BLD
