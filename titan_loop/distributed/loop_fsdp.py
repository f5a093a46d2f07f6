"""FSDP2 for a stack that is visited R times: when units are gathered and freed.

    per_visit   every visit gathers a layer, forward and backward: 2·R all-gathers a micro-batch
    per_step    the first visit of a step gathers it, the end of the step frees it: one a step

Either way gradients are reduced once per unit and micro-batch, since autograd adds the R
contributions first. README.md beside this file follows a layer's weights through a step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh
from torchtitan.tools.logging import logger

from titan_loop import compat
from titan_loop.errors import Refusal
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.units import Unit, UnitSize, innermost_first, sharded_axis

FSDPPolicy = Literal["per_visit", "per_step", "auto"]
HELD_SHARE = 0.1
"""Largest share of a device's memory that `fsdp.policy=auto` gives to gathered looped layers."""


@dataclass(kw_only=True, slots=True)
class FSDPConfig:
    """FSDP of layers that are visited R times; see `titan_loop/distributed/README.md`."""

    policy: FSDPPolicy = "auto"
    """per_visit gathers a layer for every visit, per_step once a training step; auto is per_step
    where the gathered looped layers take at most a tenth of the smallest device's memory and
    nothing else asks for per_visit."""

    fp32_visit_sum: bool = False
    """Add up a layer's R gradient contributions in fp32, for 4 instead of 2 bytes per parameter."""

    def refusals(self, parallelism: ParallelismConfig) -> Iterator[Refusal]:
        """Refuse settings that contradict each other."""
        if self.policy == "per_step" and parallelism.fsdp_reshard_after_forward == "always":
            problem = "contradicts fsdp.policy=per_step, which keeps layers gathered"
            fix = "leave it at default, or set fsdp.policy=per_visit"
            yield Refusal.of("parallelism.fsdp_reshard_after_forward", "always", problem, fix)

    def decided(
        self,
        sizes: Sequence[UnitSize],
        parallelism: ParallelismConfig,
        *,
        compute_bytes: int,
        device_bytes: float,
    ) -> tuple["FSDPConfig", str]:
        """Return this config with `auto` decided, and the reason, for training and `plan`.

        `compute_bytes` is the size of a parameter in the forward pass, `device_bytes` the memory of
        the smallest device or a rank's share of the host's.
        """
        if self.policy != "auto":
            return self, "as set"
        if parallelism.fsdp_reshard_after_forward == "always":
            reason = "because of parallelism.fsdp_reshard_after_forward=always"
            return replace(self, policy="per_visit"), reason
        tensor, experts = parallelism.tensor_parallel_degree, parallelism.expert_parallel_degree
        held = compute_bytes * sum(
            size.parameters() / (experts if size.unit.spread and experts > 1 else tensor)
            for size in sizes
            if size.unit.is_revisited
        )
        policy: FSDPPolicy = "per_step" if held <= HELD_SHARE * device_bytes else "per_visit"
        reason = f"held layers take {held / 2**30:.2f} GiB of {device_bytes / 2**30:.2f}"
        return replace(self, policy=policy), reason


def shard_units(
    model: LoopDecoder,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    fsdp: FSDPConfig,
) -> None:
    """Apply FSDP2 to the units of a decoder, in place; `fsdp.policy` must not be auto."""
    mesh_dims, replicate = None, ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
    if parallelism.spmd_backend == "spmd_types":
        mesh, mesh_dims = resolve_fsdp_mesh(parallel_dims)
    else:
        mesh = parallel_dims.get_mesh([*replicate, "fsdp"])
    spread_mesh = mesh
    if parallel_dims.ep_enabled:
        spread_mesh = parallel_dims.get_mesh([*replicate, "efsdp"])
    offload = OffloadPolicy()
    if training.enable_cpu_offload:  # pinned memory needs a GPU
        offload = CPUOffloadPolicy(pin_memory=compat.device_type() == "cuda")
    # The loss weights handed to the head must stay fp32, hence no casting of inputs.
    mixed_precision = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        cast_forward_inputs=False,
    )
    when, hold_layers = parallelism.fsdp_reshard_after_forward, fsdp.policy == "per_step"

    def shard(
        modules: nn.Module | list[nn.Module], reshard: bool | None, spread: bool, **changes: Any
    ) -> None:
        degree = parallel_dims.dp_shard * parallel_dims.cp
        degree *= parallel_dims.tp if spread and parallel_dims.ep_enabled else 1
        fully_shard(
            modules,
            mesh=spread_mesh if spread else mesh,
            dp_mesh_dims=mesh_dims,
            shard_placement_fn=lambda parameter: Shard(sharded_axis(parameter.shape, degree)),
            mp_policy=replace(mixed_precision, **changes),
            offload_policy=offload,
            reshard_after_forward=reshard,
        )

    units = model.units()
    # Innermost first: `fully_shard` takes every parameter below it that no other call has taken, so
    # a layer sharded before its experts would take them, with the wrong mesh and dtype.
    for unit in innermost_first(model, units):
        held = hold_layers and unit.is_revisited
        reshards = when == "always" if unit.kept else when != "never" and not held
        fp32 = {"param_dtype": torch.float32} if unit.fp32 else {}
        shard([*unit.modules], reshards, unit.spread, **fp32)
        # FSDP counts a unit of several modules as visited when each has run once, but embedding and
        # head of a unit between two steps are called again and again. Without this, the weights
        # would not come back for the backward pass of a second call, nor be freed after it.
        if unit.between and len(unit.modules) > 1:
            compat.gather_at_every_visit(unit.modules)
        if not unit.gathered_in_backward:
            _fsdp(unit).set_unshard_in_backward(False)
    # The root last: its units must be FSDP modules already. It owns no parameter, but does what is
    # due once a pass, such as waiting for the optimiser and finishing the backward pass. None is
    # FSDP's choice for a root, which keeps its (no) weights until then.
    shard(model, reshard=None, spread=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the global token count. gloo only has plain sums.
            module.set_gradient_divide_factor(1.0)
            if compat.device_type() == "cpu":
                module.set_force_sum_reduction_for_comms(True)
    if hold_layers:
        _hold_visited_units(model, units)
    if fsdp.fp32_visit_sum:
        _sum_visits_in_fp32(model, units, hold_layers=hold_layers)
    model.register_forward_hook(_reshard_without_backward)
    model.lm_head.register_forward_hook(_reshard_without_backward)
    kind = "HSDP" if parallel_dims.dp_replicate_enabled else "FSDP"
    logger.info("Applied %s (%s) over %s", kind, fsdp.policy, mesh)


def reshard_units(model: nn.Module) -> None:
    """Free every gathered or cast weight and put the parameters, with their gradients, back.

    Call it after a step's last backward pass: under `per_step`, and in bf16 on one device, the
    layers' `.grad` is None until then.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, LoopDecoder) and module.low_weights is not None:
            module.low_weights.leave()


def _hold_visited_units(model: LoopDecoder, units: Sequence[Unit]) -> None:
    """Keep revisited units gathered through the backward pass, too, and gather one unit ahead."""
    for unit in units:
        if unit.is_revisited:
            _fsdp(unit).set_reshard_after_backward(False, recurse=False)
    held = [_fsdp(unit) for unit in units if unit.place == "step"]
    # Only the first visit gathers; at all others these prefetches do nothing.
    _as_fsdp(model).set_modules_to_forward_prefetch([_as_fsdp(model.tok_embeddings), held[0]])
    for unit, following in pairwise(held):
        unit.set_modules_to_forward_prefetch([following])


def _sum_visits_in_fp32(model: LoopDecoder, units: Sequence[Unit], *, hold_layers: bool) -> None:
    """Let autograd cast each visit's contribution to fp32 before it adds them up."""

    def set_gradient_dtype(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        handle.remove()  # FSDP keeps the unsharded parameter that its first gather creates
        for unit in units:
            if unit.place != "step" or unit.fp32:
                continue
            _fsdp(unit).unshard()
            for visited in unit.modules:
                for parameter in visited.parameters():
                    parameter.grad_dtype = torch.float32
                compat.sum_gradients_as_declared(visited)
            if not hold_layers:
                _fsdp(unit).reshard()

    handle = model.register_forward_pre_hook(set_gradient_dtype)


def _reshard_without_backward(module: nn.Module, inputs: Any, output: Any) -> None:
    """Free weights that a pass without gradients gathered, since no backward pass will."""
    if not torch.is_grad_enabled():
        reshard_units(module)


def _fsdp(unit: Unit) -> FSDPModule:
    return _as_fsdp(unit.modules[0])


def _as_fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
