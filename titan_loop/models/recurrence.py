"""How the stack is applied repeatedly: a replaceable object with a hook between recurrent steps."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torchtitan.protocols.module import Module

from titan_loop.models.context import LoopContext

if TYPE_CHECKING:
    from titan_loop.models.decoder import LoopDecoder


class Recurrence(Module):
    """h_r = step(between_steps(h_{r-1})): the plain loop of Ouro, without input injection.

    Families that change what flows from one step to the next (a decoded channel, noise, a discrete
    bottleneck) subclass this and override `between_steps`; the decoder, and with it the readout, is
    an argument, so the hook can decode.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """The plain loop has nothing to configure."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def between_steps(self, model: "LoopDecoder", hidden_BLD: Tensor, step: int) -> Tensor:
        """Return what step + 1 starts from, given the state after `step` ≥ 1; here the same."""
        return hidden_BLD

    def run(
        self,
        model: "LoopDecoder",
        hidden_BLD: Tensor,
        from_step: int,
        to_step: int,
        context: LoopContext,
    ) -> Iterator[Tensor]:
        """Yield the state after each of the steps from_step + 1 … to_step.

        With `model.backward_steps` = k the steps before the last k run without recording anything
        for the backward pass, and their states are constants to it; with `model.recompute_steps`
        a step keeps only what it started from.

        Args:
            model: Owns the layers.
            hidden_BLD: State after `from_step`; the embedding if that is 0.
            from_step: Steps already done.
            to_step: Last step to run.
            context: Shared by all visits.
        """
        recorded_from = 1
        if model.backward_steps is not None:
            recorded_from = to_step - model.backward_steps + 1
        for step in range(from_step + 1, to_step + 1):
            # The context must not stay open while the generator is suspended.
            with torch.set_grad_enabled(torch.is_grad_enabled() and step >= recorded_from):
                if step > 1:
                    hidden_BLD = self.between_steps(model, hidden_BLD, step - 1)
                if model.recompute_steps and torch.is_grad_enabled():
                    hidden_BLD = _recomputed(model, hidden_BLD, step, context)
                else:
                    hidden_BLD = model.step(hidden_BLD, step, context)
            yield hidden_BLD


def _recomputed(
    model: "LoopDecoder", hidden_BLD: Tensor, step: int, context: LoopContext
) -> Tensor:
    # Stopping early would leave FSDP's units without their post-forward hook.
    state = checkpoint(
        model.step,
        hidden_BLD,
        step,
        context,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing in a step is random
        early_stop=False,
    )
    assert isinstance(state, Tensor)
    return state
