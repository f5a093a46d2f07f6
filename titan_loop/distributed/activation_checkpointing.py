"""Activation checkpointing by recurrent step, and by layer with inputs kept on the host.

| policy | kept for the backward pass | recomputed |
|---|---|---|
| `selective` | every second matrix product, attention | the rest |
| `full` | the input of every layer visit: R·N states | a layer at a time |
| `full-offload` | the same, in pinned memory of the host | a layer at a time |
| `recurrent-step` | the state after every recurrent step: R states | N layers at a time |
| `recurrent-step` with `layers=full` | R states | N inputs of layers, then a layer at a time |

The first two are torchtitan's. Checkpointing by step pays where R·N states are too many:
`layers=full` keeps R + N of them, for one more forward pass of the stack than `full`.
`full-offload` keeps none on the GPU, for a copy of each state to the host and back.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import tyro
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import OffloadWrapper
from torch.utils.checkpoint import checkpoint
from torchtitan.config import ParallelismConfig
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    MemoryBudgetAC,
    SelectiveAC,
)
from torchtitan.tools.logging import logger

from titan_loop.errors import UserError
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.dropout import draws
from titan_loop.models.recurrence import Part


class RecurrentStepAC(ActivationCheckpointing):
    """Recompute a whole recurrent step during the backward pass."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """Checkpointing of layers within a step that is recomputed."""

        layers: Literal["none", "full"] = "none"
        """full keeps only each layer's input while the step is recomputed, and recomputes the layer
        once more when its backward pass comes."""

    config: Config

    def apply(self, model: nn.Module) -> None:
        """Wrap the recurrent steps of a `LoopDecoder`, its prelude and its coda."""
        assert isinstance(model, LoopDecoder)
        random = draws(model)
        model.recurrence.wrap_steps(partial(_recompute, random=random))
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


class FullOffloadAC(FullAC):
    """Recompute a layer at a time, from inputs kept in the host's memory.

    The copies are asynchronous, to and from pinned memory, but in the compute stream, so each
    delays it. Only states are moved: weights, rotations and masks stay. Never run on a GPU here.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        """As for `full`."""

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        return _OffloadedLayer(super()._wrap_block(module, base_fqn=base_fqn))


class _OffloadedLayer(OffloadWrapper):
    """A checkpointed layer whose input is saved on the host.

    A compiled graph chooses which tensors it saves, weights among them, so the layer inside of the
    checkpoint is compiled, not the checkpoint.
    """

    def compile(self, *args: Any, **kwargs: Any) -> None:
        checkpointed = self._checkpoint_wrapped_module
        checkpointed.get_submodule("_checkpoint_wrapped_module").compile(*args, **kwargs)


def check_recomputation(
    config: ActivationCheckpointing.Config | None,
    parallelism: ParallelismConfig,
    *,
    draws: bool = False,
) -> None:
    """Refuse a policy where it cannot work.

    Raises:
        UserError: States to be offloaded are split by tensor parallelism, or random numbers would
            differ when they are drawn again.
    """
    if draws and config is not None and not config.preserve_rng_state:
        raise UserError(
            "activation_checkpoint.preserve_rng_state=False recomputes with other dropout masks; "
            "leave it True"
        )
    degree = parallelism.tensor_parallel_degree
    if isinstance(config, FullOffloadAC.Config) and degree > 1:
        raise UserError(
            "activation-checkpoint:full-offload does not work with "
            f"parallelism.tensor_parallel_degree={degree}, which splits the states; use "
            "activation-checkpoint:full"
        )


ActivationCheckpointingConfig = (
    Annotated[SelectiveAC.Config, tyro.conf.subcommand("selective")]
    | Annotated[FullAC.Config, tyro.conf.subcommand("full")]
    | Annotated[FullOffloadAC.Config, tyro.conf.subcommand("full-offload")]
    | Annotated[RecurrentStepAC.Config, tyro.conf.subcommand("recurrent-step")]
    | Annotated[MemoryBudgetAC.Config, tyro.conf.subcommand("memory-budget")]
    | Annotated[None, tyro.conf.subcommand("none")]
)
"""torchtitan's policies and ours, by the name they have on the command line."""


def checkpointing_of(config: ActivationCheckpointing.Config | None) -> str:
    """Return the name of a policy in `plan`."""
    if isinstance(config, RecurrentStepAC.Config):
        return "recurrent-step+full" if config.layers == "full" else "recurrent-step"
    if isinstance(config, FullOffloadAC.Config):
        return "full-offload"
    if isinstance(config, FullAC.Config):
        return "full"
    if isinstance(config, SelectiveAC.Config):
        return "selective"
    return "memory-budget" if isinstance(config, MemoryBudgetAC.Config) else "none"
