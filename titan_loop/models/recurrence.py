"""How the stack is applied repeatedly: a replaceable object with a hook between recurrent steps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torchtitan.protocols.module import Module

from titan_loop.models.context import LoopContext

Step = Callable[[Tensor, int, LoopContext], Tensor]
"""(h_{r-1}, r, context) → h_r."""


class LoopedModel(Protocol):
    """What a recurrence may use of the decoder it loops."""

    def step(self, hidden_BLD: Tensor, step: int, context: LoopContext) -> Tensor:
        """Apply every layer once, then the final norm."""
        ...

    def readout(self, hidden_BLD: Tensor) -> Tensor:
        """Map a state (B, L, D) to logits (B, L, V)."""
        ...


class Recurrence(Module):
    """h_r = step(between_steps(h_{r-1})): the plain loop of Ouro, without input injection.

    Families that change what flows from one step to the next (a decoded channel, noise, a discrete
    bottleneck) subclass this and override `between_steps`; the decoder, and with it the readout, is
    an argument, so the hook can decode.

    Attributes:
        backward_steps: Number of last steps that the backward pass reaches; None for all.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Reach of the backward pass."""

        backward_steps: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.backward_steps = config.backward_steps
        self._wrap: Callable[[Step], Step] | None = None

    def wrap_steps(self, wrap: Callable[[Step], Step]) -> None:
        """Run `wrap(step)` in place of every step, for example to recompute it when needed."""
        self._wrap = wrap

    def between_steps(self, model: LoopedModel, hidden_BLD: Tensor, step: int) -> Tensor:
        """Return what step + 1 starts from, given the state after `step` ≥ 1; here the same."""
        return hidden_BLD

    def run(
        self,
        model: LoopedModel,
        hidden_BLD: Tensor,
        from_step: int,
        to_step: int,
        context: LoopContext,
    ) -> Iterator[Tensor]:
        """Yield the state after each of the steps from_step + 1 … to_step.

        With `backward_steps` = k the steps before the last k run without recording anything for the
        backward pass, and their states are constants to it.

        Args:
            model: Owns the layers.
            hidden_BLD: State after `from_step`; the embedding if that is 0.
            from_step: Steps already done.
            to_step: Last step to run.
            context: Shared by all visits.
        """
        run_step = model.step if self._wrap is None else self._wrap(model.step)
        recorded_from = 1
        if self.backward_steps is not None:
            recorded_from = to_step - self.backward_steps + 1
        for step in range(from_step + 1, to_step + 1):
            # The context must not stay open while the generator is suspended.
            with torch.set_grad_enabled(torch.is_grad_enabled() and step >= recorded_from):
                if step > 1:
                    hidden_BLD = self.between_steps(model, hidden_BLD, step - 1)
                hidden_BLD = run_step(hidden_BLD, step, context)
            yield hidden_BLD
