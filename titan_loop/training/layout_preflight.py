"""Reasons why a run does not fit its ranks: parallelism and batches.

The rehearsal in `titan_loop/planning` measures whether a step fits the memory of a device.
"""

import math
from collections.abc import Iterator
from functools import partial

import titan_loop.compat as compat  # before any torchtitan module

from titan_loop.distributed.activation_checkpointing import checkpointing_of
from titan_loop.distributed.float8 import float8_linears
from titan_loop.distributed.parallelize import parallelism_refusals
from titan_loop.distributed.state_bytes import StateBytes, state_bytes
from titan_loop.errors import Refusal, caught
from titan_loop.models.decoder import LoopDecoder
from titan_loop.training.batch_schedule import batch_sizes
from titan_loop.training.config import RunConfig


def layout_refusals(
    config: RunConfig, model: LoopDecoder.Config, world_size: int
) -> Iterator[Refusal]:
    """Refuse degrees of parallelism that do not fit the model, the window or the ranks."""
    parallel, attention = config.parallelism, model.layers[0].attention
    yield from parallelism_refusals(
        parallel,
        world_size=world_size,
        n_heads=attention.n_heads,
        n_kv_heads=attention.n_kv_heads or attention.n_heads,
        seq_len=config.training.seq_len,
        attention=config.model.attention,
    )
    check_model = partial(
        model.check_spreading,
        tensor_parallel=parallel.tensor_parallel_degree,
        context_parallel=parallel.context_parallel_degree,
        expert_parallel=parallel.expert_parallel_degree,
    )
    yield from caught("parallelism", check_model)
    yield from config.fsdp.refusals(parallel)
    recomputed = config.activation_checkpoint
    if model.draws and recomputed is not None and not recomputed.preserve_rng_state:
        problem = "recomputes with other dropout masks; leave it True"
        yield Refusal.of("activation_checkpoint.preserve_rng_state", False, problem)
    if config.float8 != "off":
        yield from _float8_refusals(config, model)
    if config.compile.graphs:
        yield from _graph_refusals(config, model, world_size)


def _float8_refusals(config: RunConfig, model: LoopDecoder.Config) -> Iterator[Refusal]:
    refuse = partial(Refusal.of, "float8", config.float8)
    training, parallel = config.training, config.parallelism
    if (degree := parallel.tensor_parallel_degree) > 1:
        problem = f"does not support parallelism.tensor_parallel_degree={degree}"
        yield refuse(problem, "leave it at 1")
    if config.compile.enable and compat.device_type() == "cpu":
        problem = "is emulated without a GPU, which cannot be compiled"
        yield refuse(problem, "set --compile.no-enable")
    tokens = training.local_batch_size * training.seq_len
    tokens //= max(1, parallel.context_parallel_degree)
    sides = {"the tokens of a rank's pass": tokens}
    for name, linear in float8_linears(model).items():
        sides |= {f"the inputs of {name}": linear.in_features}
        sides |= {f"the outputs of {name}": linear.out_features}
    # Tensor cores need it.
    if uneven := [f"{name} are {size}" for name, size in sides.items() if size % 16]:
        yield refuse(f"needs multiples of 16, and {uneven[0]}", "change it, or leave it off")


def _graph_refusals(
    config: RunConfig, model: LoopDecoder.Config, world_size: int
) -> Iterator[Refusal]:
    """Refuse visits that CUDA graphs cannot hold."""
    refuse = partial(Refusal.of, "compile.graphs", True)
    off = "or leave it False"
    if not config.compile.enable:
        yield refuse("captures compiled layers", f"set --compile.enable, {off}")
    gathers = {
        f"{world_size} ranks": world_size > 1,
        "training.enable_cpu_offload=True": config.training.enable_cpu_offload,
        "parallelism.spmd_backend=spmd_types": config.parallelism.spmd_backend == "spmd_types",
    }
    for cause in [each for each, found in gathers.items() if found][:1]:
        problem = f"cannot capture the weights that FSDP gathers within a visit with {cause}"
        yield refuse(problem, f"change it, {off}")
    if (kernel := config.model.attention) != "sdpa":
        problem = f"cannot capture masks whose form the data decide, of model.attention={kernel}"
        yield refuse(problem, f"use sdpa, {off}")
    if not model.whole_visits:
        problem = f"cannot capture model.family={model.family}, whose visits depend on step or data"
        yield refuse(problem, "leave it False")
    if (policy := checkpointing_of(config.activation_checkpoint)) != "none":
        yield refuse(
            f"cannot capture what activation_checkpoint:{policy} recomputes", f"use none, {off}"
        )
    if config.trainable != "all":
        problem = f"captures gradients of layers, which trainable={config.trainable} freezes"
        yield refuse(problem, "leave it False")


def batch_refusals(config: RunConfig, world_size: int) -> Iterator[Refusal]:
    """Refuse a batch that ranks cannot split evenly; assumes that `layout_refusals` is empty."""
    parallel, training = config.parallelism, config.training
    shared = parallel.tensor_parallel_degree * parallel.context_parallel_degree
    ranks, local = max(1, world_size // shared), training.local_batch_size
    sizes = batch_sizes(config.batch, training.seq_len, config.total_tokens)
    refused = [windows for windows in sorted(sizes) if windows % (local * ranks)]
    if not refused:
        return
    fitting = [size for size in range(1, local) if math.gcd(*sizes) % (size * ranks) == 0]
    fixes = [f"--training.local-batch-size {size}" for size in fitting[-1:]]
    if len(sizes) > 1 and min(sizes) % (local * ranks) == 0:
        fixes.append(f"--batch.multiple-of-windows {local * ranks}")
    else:
        unit = local * ranks * training.seq_len
        fixes.append(f"--batch.global-batch-tokens of multiples of {unit:,} tokens")
    problem = f"a global batch of {refused[0]} windows does not divide by local_batch_size="
    problem += f"{local} × {ranks} data-parallel ranks"
    yield Refusal("batch.global_batch_tokens", problem, f"use {', or '.join(fixes)}")


def run_states(config: RunConfig, model: LoopDecoder.Config, ranks: int) -> StateBytes:
    """Return the bytes of weights, gradients and moments on one of `ranks` ranks."""
    tensor_parallel = config.parallelism.tensor_parallel_degree
    replicas = config.parallelism.data_parallel_replicate_degree
    chosen = config.optimizers()[config.optimizer.name]
    return state_bytes(
        model,
        shards=max(1, ranks // (replicas * tensor_parallel)),
        tensor_parallel=tensor_parallel,
        trainable=config.trainable,
        moments=(chosen.moments, (chosen if chosen.takes_all else config.adamw).moments),
        averaged=config.ema.decay > 0,
    )
