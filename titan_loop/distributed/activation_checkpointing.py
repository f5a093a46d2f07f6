"""Activation checkpointing by recurrent step, by operation, and with inputs on the host.

README.md beside this file says what every policy keeps and recomputes. `selective`, `full` and
`memory-budget` are torchtitan's; the field `save` is ours.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import tyro
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import OffloadWrapper
from torch.utils.checkpoint import CheckpointPolicy as Keep
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import activation_checkpoint as upstream
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    MemoryBudgetAC,
)
from torchtitan.tools.logging import logger

from titan_loop.errors import UserError, nearest
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.dropout import draws
from titan_loop.models.recurrence import Part

_aten = torch.ops.aten
_ADDED = {
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    _aten._grouped_mm.default,
    _aten._scaled_grouped_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}
_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.linear.", "aten._scaled_mm.")
_SAVED = {
    "attention": ("attention", "attn"),
    "communication": ("_c10d_functional.", "deepep.", "hybridep."),
    "every-second-mm": _PRODUCTS,
    "experts": ("grouped_mm",),
    "mm": _PRODUCTS,
}
"""Value of `SelectiveAC.Config.save` → parts of the names of its operations."""


class SelectiveAC(upstream.SelectiveAC):
    """Keep the results of chosen operations of a layer, and recompute everything else."""

    @dataclass(kw_only=True, slots=True)
    class Config(upstream.SelectiveAC.Config):
        """torchtitan's, with a choice of operations."""

        save: list[str] | None = None
        """Operations whose results are kept: attention, communication, experts (grouped products),
        mm (matrix products, but for force_recompute_mm_shapes_by_fqns), every-second-mm, which
        keeps all products of layers with a bias and of float8 on a GPU. None is torchtitan's
        choice: attention on a GPU, reduce-scatters, all-to-alls and every-second-mm. The router's
        choices of experts and the maxima for float8 are always kept."""

    config: Config

    def get_save_ops(self) -> set[Any]:
        """Return the operations that may be kept."""
        ops, save = super().get_save_ops(), self.config.save
        if save is None:
            return ops
        chosen = {part for name in save for part in _SAVED[name]}
        left_out = {part for parts in _SAVED.values() for part in parts} - chosen
        return {op for op in ops | _ADDED if not any(part in str(op) for part in left_out)}

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        wrapped = super()._wrap_block(module, base_fqn=base_fqn)
        if "mm" in (self.config.save or ()):
            keywords = vars(wrapped)["checkpoint_fn"].keywords
            keywords["context_fn"] = partial(_keep_all_products, keywords["context_fn"])
        return wrapped


def _keep_all_products(contexts: Callable[[], tuple[Any, Any]]) -> Any:
    policy = contexts()[0].policy_fn

    def asked_twice(context: Any, op: Any, *args: Any, **kwargs: Any) -> Keep:
        keep = policy(context, op, *args, **kwargs)
        if keep is Keep.PREFER_RECOMPUTE and op in (_aten.mm.default, _aten.linear.default):
            # torchtitan keeps every second product: asked again, it keeps all but forced shapes.
            return policy(context, op, *args, **kwargs)
        return keep

    return create_selective_checkpoint_contexts(asked_twice)


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


class FullOffloadAC(FullAC):
    """Recompute a layer at a time, from inputs kept in the host's memory.

    The copies use pinned memory and do not block the host, but they run in the compute stream and
    delay it. Weights, rotations and masks stay on the GPU. This policy has not run on one yet.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        """As for `full`."""

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        return _OffloadedLayer(super()._wrap_block(module, base_fqn=base_fqn))


class _OffloadedLayer(OffloadWrapper):
    def compile(self, *args: Any, **kwargs: Any) -> None:
        # Compile the layer inside the checkpoint: a compiled checkpoint would offload weights, too.
        checkpointed = self._checkpoint_wrapped_module
        checkpointed.get_submodule("_checkpoint_wrapped_module").compile(*args, **kwargs)


def check_recomputation(
    config: ActivationCheckpointing.Config | None,
    parallelism: ParallelismConfig,
    *,
    draws: bool = False,
    linears: Mapping[str, bool],
) -> None:
    """Raise `UserError` if a policy does not fit the layout, dropout (`draws`) or the `linears`.

    `linears` are by name: True where `selective` keeps all products, with a bias or in float8.
    """
    if isinstance(config, SelectiveAC.Config):
        _check_names(config, linears)
    if draws and config is not None and not config.preserve_rng_state:
        problem = "preserve_rng_state=False recomputes with other dropout masks; leave it True"
        raise UserError(f"activation_checkpoint.{problem}")
    degree = parallelism.tensor_parallel_degree
    if isinstance(config, FullOffloadAC.Config) and degree > 1:
        problem = f"parallelism.tensor_parallel_degree={degree} splits the states that "
        problem += "activation-checkpoint:full-offload moves"
        raise UserError(f"{problem}; use activation-checkpoint:full")


def _check_names(config: SelectiveAC.Config, given: Mapping[str, bool]) -> None:
    for name in config.save or ():
        if name not in _SAVED:
            problem = f"{name} is not an operation; known: {', '.join(_SAVED)}"
            raise UserError(f"activation_checkpoint.save={config.save}: {problem}")
    # A config's wkv is built as wk and wv.
    linears = {
        linear.replace("wkv", name): kept for linear, kept in given.items() for name in ("wk", "wv")
    }
    own = {linear.split(".", 2)[-1] for linear in linears if linear.startswith("layers.")}
    for name in config.force_recompute_mm_shapes_by_fqns:
        if name == "moe.router.gate":  # torchtitan's default, for any model
            continue
        # torchtitan matches any part of a name, and fails if another kind of module matches, too.
        alone = not any(name in linear.rpartition(".")[0] for linear in linears)
        if not (alone and any(name in linear for linear in own)):
            problem = f"does not name linear layers{nearest(name, own)}"
        elif all(kept for linear, kept in linears.items() if name in linear):
            problem = "has no effect: products with a bias, and in float8, are always kept"
        else:
            continue
        field = "activation_checkpoint.force_recompute_mm_shapes_by_fqns"
        raise UserError(f"{field}: {name} {problem}")


ActivationCheckpointingConfig = (
    Annotated[SelectiveAC.Config, tyro.conf.subcommand("selective")]
    | Annotated[FullAC.Config, tyro.conf.subcommand("full")]
    | Annotated[FullOffloadAC.Config, tyro.conf.subcommand("full-offload")]
    | Annotated[RecurrentStepAC.Config, tyro.conf.subcommand("recurrent-step")]
    | Annotated[MemoryBudgetAC.Config, tyro.conf.subcommand("memory-budget")]
    | Annotated[None, tyro.conf.subcommand("none")]
)
"""torchtitan's policies and ours, by their names on the command line."""


def checkpointing_of(config: ActivationCheckpointing.Config | None) -> str:
    """Return the policy's name in messages and in the table of `plan`."""
    if isinstance(config, RecurrentStepAC.Config):
        return "recurrent-step+full" if config.layers == "full" else "recurrent-step"
    names = {
        FullOffloadAC.Config: "full-offload",
        FullAC.Config: "full",
        upstream.SelectiveAC.Config: "selective",
        MemoryBudgetAC.Config: "memory-budget",
    }
    return next((name for kind, name in names.items() if isinstance(config, kind)), "none")
