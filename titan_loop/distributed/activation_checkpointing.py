"""Activation checkpointing: torchtitan's policies, and one by recurrent step.

README.md beside this file says what every policy keeps and recomputes.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import tyro
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    MemoryBudgetAC,
    SelectiveAC,
)
from torchtitan.tools.logging import logger

from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.dropout import draws
from titan_loop.models.recurrence import Part


class RecurrentStepAC(ActivationCheckpointing):
    """Recompute a whole recurrent step during the backward pass."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """Checkpointing of layers within a step that is recomputed."""

        layers: Literal["none", "full"] = "none"
        """full keeps only each layer's input while a step is recomputed, and recomputes the layer
        once more in its backward pass."""

    config: Config

    def apply(self, model: nn.Module) -> None:
        """Wrap the recurrent steps of a `LoopDecoder`, its prelude and its coda."""
        assert isinstance(model, LoopDecoder)
        random = draws(model)
        model.recurrence.wrap = partial(_recompute, random=random)
        if self.config.layers == "full":
            layers = FullAC.Config(preserve_rng_state=random)
            layers.build(dump_folder=self.dump_folder).apply(model)
        logger.info("Applied activation checkpointing by recurrent step")


def _recompute(part: Part, *, random: bool) -> Part:
    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return part(*args)
        # Stopping early would leave FSDP's units without their post-forward hook.
        return checkpoint(
            part, *args, use_reentrant=False, preserve_rng_state=random, early_stop=False
        )

    return run


ActivationCheckpointingConfig = (
    Annotated[SelectiveAC.Config, tyro.conf.subcommand("selective")]
    | Annotated[FullAC.Config, tyro.conf.subcommand("full")]
    | Annotated[RecurrentStepAC.Config, tyro.conf.subcommand("recurrent-step")]
    | Annotated[MemoryBudgetAC.Config, tyro.conf.subcommand("memory-budget")]
    | Annotated[None, tyro.conf.subcommand("none")]
)
"""The policies by their names on the command line."""


def checkpointing_of(config: ActivationCheckpointing.Config | None) -> str:
    """Return the policy's name in messages and in the table of `plan`."""
    if isinstance(config, RecurrentStepAC.Config):
        return "recurrent-step+full" if config.layers == "full" else "recurrent-step"
    names = {
        FullAC.Config: "full",
        SelectiveAC.Config: "selective",
        MemoryBudgetAC.Config: "memory-budget",
    }
    return next((name for kind, name in names.items() if isinstance(config, kind)), "none")


def recomputes_layers(config: ActivationCheckpointing.Config | None) -> bool:
    """Return whether a policy recomputes parts of a visit of the stack, not the whole visit."""
    if isinstance(config, RecurrentStepAC.Config):
        return config.layers != "none"
    return config is not None
