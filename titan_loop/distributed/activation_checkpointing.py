"""Activation checkpointing with a recurrent step, instead of a layer, as what is recomputed.

| policy | kept for the backward pass | recomputed |
|---|---|---|
| `selective` | every second matrix product, attention | the rest |
| `full` | the input of every layer visit: R·N states | a layer at a time |
| `recurrent-step` | the state after every recurrent step: R states | N layers at a time |
| `recurrent-step` with `layers=full` | R states | N inputs of layers, then a layer at a time |

The first two are torchtitan's. By step pays where R·N states are too many: `layers=full` keeps
R + N of them instead, for one more forward pass of the stack than `full`.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import tyro
from torch import nn
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    MemoryBudgetAC,
    SelectiveAC,
)
from torchtitan.tools.logging import logger

from titan_loop.distributed.memory import Checkpointing
from titan_loop.models.decoder import LoopDecoder


class RecurrentStepAC(ActivationCheckpointing):
    """Recompute a whole recurrent step during the backward pass."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """What happens to the layers of the step that is being recomputed."""

        layers: Literal["none", "full"] = "none"
        """full keeps only each layer's input while the step is recomputed, and recomputes the layer
        once more when its backward pass comes."""

    config: Config

    def apply(self, model: nn.Module) -> None:
        """Switch recomputation on in a `LoopDecoder`."""
        assert isinstance(model, LoopDecoder)
        model.recompute_steps = True
        if self.config.layers == "full":
            FullAC.Config(preserve_rng_state=False).build(dump_folder=self.dump_folder).apply(model)
        logger.info("Applied activation checkpointing by recurrent step")


ActivationCheckpointingConfig = (
    Annotated[SelectiveAC.Config, tyro.conf.subcommand("selective")]
    | Annotated[FullAC.Config, tyro.conf.subcommand("full")]
    | Annotated[RecurrentStepAC.Config, tyro.conf.subcommand("recurrent-step")]
    | Annotated[MemoryBudgetAC.Config, tyro.conf.subcommand("memory-budget")]
    | Annotated[None, tyro.conf.subcommand("none")]
)
"""torchtitan's policies and ours, by the name they have on the command line."""


def checkpointing_of(config: ActivationCheckpointing.Config | None) -> Checkpointing:
    """Return what the memory estimate calls a policy; a memory budget counts as none."""
    if isinstance(config, RecurrentStepAC.Config):
        return "recurrent-step+full" if config.layers == "full" else "recurrent-step"
    if isinstance(config, FullAC.Config):
        return "full"
    if isinstance(config, SelectiveAC.Config):
        return "selective"
    return "none"  # a memory budget only ever saves less
