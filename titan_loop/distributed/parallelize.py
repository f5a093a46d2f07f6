"""Applies context and tensor parallelism, checkpointing, compilation and FSDP2, in this order.

Every unique layer stands once in `model.layers`, so each of these steps sees a weight once,
although it is visited R times. The decoder lists its FSDP units, and `loop_fsdp.py` decides when
each is gathered. If only the exit gate trains, the rest is frozen first: FSDP reduces nothing else.
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.distributed.compile import apply_compile
from torchtitan.protocols.module import Module
from torchtitan.tools import utils as titan_utils
from torchtitan.tools.logging import logger

from titan_loop import compat
from titan_loop.distributed.activation_checkpointing import recomputes_layers
from titan_loop.distributed.captured_visits import CapturedVisits
from titan_loop.distributed.compiled_visit import can_share_code, compiled_visit
from titan_loop.distributed.compiler import missing_compiler
from titan_loop.distributed.context_parallel import (
    context_parallel_refusals,
    gather_keys_and_values,
)
from titan_loop.distributed.loop_fsdp import FSDPConfig, shard_units
from titan_loop.distributed.vocabulary_parallel import share_vocabulary
from titan_loop.errors import Refusal
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.exit_gate import Trainable, freeze_all_but_the_exit_gate
from titan_loop.models.low_weights import LowWeights
from titan_loop.models.units import unit_sizes_of
from titan_loop.ranks import warn_together


def parallelism_refusals(
    parallelism: ParallelismConfig,
    *,
    world_size: int,
    n_heads: int,
    n_kv_heads: int,
    seq_len: int,
    attention: str = "auto",
) -> Iterator[Refusal]:
    """Refuse a layout that cannot work, before any process group exists; degrees are positive."""

    def refuse(field: str, problem: str, fix: str = "") -> Refusal:
        return Refusal.of(f"parallelism.{field}", getattr(parallelism, field), problem, fix)

    tp, cp = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    replicate, backend = parallelism.data_parallel_replicate_degree, parallelism.spmd_backend
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if backend == "spmd_types" and release < (2, 15):
        problem = f"needs torch 2.15, this is {torch.__version__}"
        yield refuse("spmd_backend", problem, "use partial_dtensor")
    for name, heads in (("n_heads", n_heads), ("n_kv_heads", n_kv_heads)):
        if heads % tp:
            yield refuse("tensor_parallel_degree", f"must divide model.{name}={heads}")
    if parallelism.enable_sequence_parallel and seq_len % tp:
        fix = "change the window, or set --parallelism.no-enable-sequence-parallel"
        yield refuse("tensor_parallel_degree", f"must divide training.seq_len={seq_len}", fix)
    yield from context_parallel_refusals(parallelism, seq_len=seq_len, attention=attention)
    shard, experts = parallelism.data_parallel_shard_degree, parallelism.expert_parallel_degree
    known = replicate * tp * cp * max(shard, 1)
    if world_size % known or not (shard == -1 or (shard > 0 and known == world_size)):
        yield Refusal(
            "parallelism",
            f"parallelism degrees data_parallel_replicate={replicate} × "
            f"data_parallel_shard={shard} × context_parallel={cp} × tensor_parallel={tp} do not "
            f"factor the world size {world_size}",
            "change a degree or the number of ranks (a shard degree of -1 takes the rest)",
        )
    elif (world_size // replicate) % experts:
        problem = f"must divide the {world_size // replicate} ranks of a replica"
        yield refuse("expert_parallel_degree", problem, "change it or the number of ranks")
    if experts > 1 and backend != "partial_dtensor":
        problem = f"needs parallelism.spmd_backend=partial_dtensor, not {backend}"
        yield refuse("expert_parallel_degree", problem)


def parallelize_loop_decoder(
    model: LoopDecoder,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointing.Config | None,
    dump_folder: str,
    fsdp: FSDPConfig | None = None,
    trainable: Trainable = "all",
    graphs: bool = False,
) -> LoopDecoder:
    """Parallelize `model` in place, best on the meta device; torchtitan's `parallelize_fn`.

    Call `reshard_units` after the last backward pass of a step: FSDP may hold layers until then.
    `graphs` is `compile.graphs`, which preflight refuses where visits cannot be captured.
    """
    sizes = unit_sizes_of(model, model.units())  # asserts that every parameter belongs to one
    if parallel_dims.cp_enabled:
        gather_keys_and_values(model, parallel_dims.get_mesh("cp").get_group())
    placed = parallel_dims.tp_enabled or parallelism.spmd_backend == "spmd_types"
    if placed or parallel_dims.ep_enabled:
        # Experts alone are cut where nothing else is.
        spread = [part for unit in model.units() if unit.spread for part in unit.modules]
        for part in [model] if placed else spread:
            _check_placements(part)
        model.parallelize(parallel_dims)
        share_vocabulary(model.lm_head, parallel_dims)
    if trainable == "exit_gate":
        freeze_all_but_the_exit_gate(model)
        if ac_config is not None:
            logger.info("activation_checkpoint: off, a frozen stack keeps no activations")
    elif ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    compiled = compile_config.enable
    if compiled:
        missing = missing_compiler(compat.device_type())
        if missing is None or compile_config.backend != "inductor":
            if model.tells_step:  # its layers may need a graph for each step: not a mistake
                most = torch._dynamo.config.accumulated_recompile_limit
                torch._dynamo.config.recompile_limit = most
            parts = model.compiled_parts()
            apply_compile(parts, compile_config=compile_config, parallel_dims=parallel_dims)
        else:
            warn_together(logger, "compile.enable: %s found; running eagerly", missing)
            compiled = False
    fsdp = fsdp or FSDPConfig()
    param_dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    low = param_dtype != TORCH_DTYPE_MAP[training.dtype]
    alone = parallel_dims.world_size == 1 and not training.enable_cpu_offload
    if fsdp.fp32_visit_sum and (alone or param_dtype == torch.float32):
        warn_together(logger, "fsdp.fp32_visit_sum has no effect: visits are summed in fp32 anyway")
    if alone and not (low and parallelism.spmd_backend == "spmd_types"):
        # Graphs hold the addresses of weights, and fp32 ones are joined anew in every pass.
        if low or not graphs:
            _join_matrices(model, param_dtype if low else None)
        whole = model.config.whole_visits and not recomputes_layers(ac_config)
        if compiled and whole and (graphs or can_share_code()):
            model.compiled_visit = compiled_visit(compile_config.backend)
            if graphs:
                model.compiled_visit = captured = CapturedVisits(model.compiled_visit)
                model.register_forward_pre_hook(lambda *_: captured.begin_pass())
        return model  # nothing to shard, and FSDP copies even at size 1
    if fsdp.policy == "auto":
        available = _smallest_device_bytes()
        fsdp, reason = fsdp.decided(
            sizes, parallelism, compute_bytes=param_dtype.itemsize, device_bytes=available
        )
        logger.info("fsdp.policy=auto: %s, %s", fsdp.policy, reason)
    shard_units(model, parallel_dims, training, parallelism, fsdp)
    return model


def _join_matrices(model: LoopDecoder, dtype: torch.dtype | None) -> None:
    """Let layers multiply joined matrices; with a dtype, cast all weights to it once a step."""
    layers = enumerate(model.layers.values())
    joinable: dict[int, Any] = {
        n: layer for n, layer in layers if getattr(layer, "can_join", False)
    }
    model.joined_layers = tuple(joinable)
    if dtype is None:
        return
    model.low_weights = LowWeights(
        model,
        dtype,
        wide=[module for unit in model.units() if unit.fp32 for module in unit.modules],
        joinable={n: layer.joinable for n, layer in joinable.items()},
    )
    for module in (model, model.lm_head):  # the loss calls the head by itself
        model.low_weights.cover(module)


def _check_placements(part: nn.Module) -> None:
    """Fail for parameters without a declared placement, which would stay plain tensors."""
    for path, module in part.named_modules():
        names = {name for name, _ in module.named_parameters(recurse=False)}
        config = module._sharding_config if isinstance(module, Module) else None
        undeclared = names - set(config.state_shardings if config is not None else ())
        fix = "declare it in the Config.set_sharding of its model"
        assert not undeclared, f"{path} has no placement of {', '.join(undeclared)}: {fix}"


def _smallest_device_bytes() -> int:
    """Return the memory of the smallest device: all ranks must decide alike."""
    device = titan_utils.get_local_device()
    available = titan_utils.device_module.get_device_properties(device).total_memory
    if compat.device_type() == "cpu":
        available //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # ranks share the host
    if dist.is_initialized():
        smallest = torch.tensor(available, device=device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        available = int(smallest)
    return available
