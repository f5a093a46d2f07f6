"""Reasons why a run does not fit its ranks: parallelism, batches, memory.

Memory is checked against a lower bound: weights, gradients, moments, and a state per layer visit,
or fewer if recomputation keeps fewer. The rehearsal in `titan_loop/planning` measures peaks.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import titan_loop.compat as compat  # before any torchtitan module
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.common.linear import Linear

from titan_loop.distributed.activation_checkpointing import check_recomputation, checkpointing_of
from titan_loop.distributed.float8 import float8_linears
from titan_loop.distributed.parallelize import check_parallelism
from titan_loop.distributed.state_bytes import StateBytes, state_bytes
from titan_loop.errors import Refusal, caught
from titan_loop.models.decoder import LoopDecoder
from titan_loop.training.batch_schedule import batch_sizes
from titan_loop.training.config import RunConfig
from titan_loop.training.depth_schedule import most_recurrent_steps

_WORTH_SPLITTING = 4096
"""Fewest tokens of a window that a rank should have under context parallelism."""


def layout_refusals(
    config: RunConfig, model: LoopDecoder.Config, world_size: int
) -> Iterator[Refusal]:
    """Refuse degrees of parallelism that do not fit the model, the window or the ranks."""
    parallel, attention = config.parallelism, model.layers[0].attention
    check_degrees = partial(
        check_parallelism,
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
    recomputed = config.activation_checkpoint
    found: Any = model.traverse(Linear.Config)
    linears = {name: linear.bias for name, linear, *_ in found}
    if config.float8 != "off" and compat.device_type() != "cpu":  # emulated, it multiplies by mm
        linears |= dict.fromkeys(float8_linears(model), True)
    check_recomputed = partial(
        check_recomputation, recomputed, parallel, draws=model.draws, linears=linears
    )
    yield from caught("parallelism", check_degrees)
    yield from caught("parallelism", check_model)
    yield from caught("fsdp", lambda: config.fsdp.check(parallel))
    yield from caught("activation_checkpoint", check_recomputed)
    if config.float8 != "off":
        yield from _float8_refusals(config, model)


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
    linears, looped = float8_linears(model), tuple(f"layers.{index}." for index in model.looped)
    if not any(name.startswith(looped) for name in linears):
        problem = "converts nothing that is looped: matrices with adapters keep their precision"
        yield refuse(problem, "leave it off")
    for name, linear in linears.items():
        sides |= {f"the inputs of {name}": linear.in_features}
        sides |= {f"the outputs of {name}": linear.out_features}
    # Tensor cores need it.
    if uneven := [f"{name} are {size}" for name, size in sides.items() if size % 16]:
        yield refuse(f"needs multiples of 16, and {uneven[0]}", "change it, or leave it off")


def batch_refusals(config: RunConfig, world_size: int) -> Iterator[Refusal]:
    """Refuse a batch that ranks cannot split evenly; assumes that `layout_refusals` is empty."""
    parallel, training = config.parallelism, config.training
    degree, tp = parallel.context_parallel_degree, parallel.tensor_parallel_degree
    sizes = batch_sizes(config.batch, training.seq_len, config.total_tokens)

    def uneven(context_degree: int) -> tuple[int, list[int]]:
        """Return the windows of a forward pass on all ranks, and the batches they do not divide."""
        per_pass = training.local_batch_size * max(1, world_size // (tp * context_degree))
        return per_pass, [windows for windows in sorted(sizes) if windows % per_pass]

    per_pass, refused = uneven(degree)
    if not refused:
        return
    ranks, common = per_pass // training.local_batch_size, math.gcd(*sizes)
    fitting = [size for size in range(1, training.local_batch_size) if common % (size * ranks) == 0]
    fixes = [f"--training.local-batch-size {size}" for size in fitting[-1:]]
    if len(sizes) == 1:
        tokens = -(-min(sizes) // per_pass) * per_pass * training.seq_len
        fixes.append(f"--batch.global-batch-tokens {tokens}")
    elif min(sizes) % per_pass == 0:
        fixes.append(f"--batch.multiple-of-windows {per_pass}")
    else:
        unit = per_pass * training.seq_len
        fixes.append(f"--batch.global-batch-tokens of multiples of {unit:,} tokens")
    larger, others = degree, tp * parallel.data_parallel_replicate_degree
    while larger * 2 <= world_size and training.seq_len >= 2 * larger * _WORTH_SPLITTING:
        larger *= 2
        if world_size % (larger * others) == 0 and not uneven(larger)[1]:
            fixes.append(f"--parallelism.context-parallel-degree {larger}")
            break
    problem = f"a global batch of {refused[0]} windows does not divide by local_batch_size="
    problem += f"{training.local_batch_size} × {world_size // (tp * degree)} data-parallel ranks"
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


def memory_refusals(
    config: RunConfig, model: LoopDecoder.Config, ranks: int, device_bytes: float
) -> Iterator[Refusal]:
    """Refuse a run whose largest R cannot fit a device; assumes that nothing else is refused."""
    if config.training.enable_cpu_offload:
        return
    training, parallel = config.training, config.parallelism
    itemsize = TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize
    tokens = training.local_batch_size * training.seq_len
    tokens //= parallel.context_parallel_degree * parallel.tensor_parallel_degree
    steps = most_recurrent_steps(config.recurrence)
    reached = config.recurrence.most_backward_steps if config.trainable == "all" else 0
    recorded = model.layer_visits(steps, reached).backward
    policy = checkpointing_of(config.activation_checkpoint)
    visits = {"recurrent-step": min(steps, recorded), "full-offload": 0}.get(policy, recorded)
    if config.loss.collect(exit_gate=config.model.exit_gate) == "all":
        visits = max(visits, steps)
    needed = {
        "weights, gradients and moments": run_states(config, model, ranks).total,
        "the objective's own weights": config.loss.held_weights() * itemsize,
        f"a state for each of {visits:,.0f} visits": visits * tokens * model.dim * itemsize,
    }
    if (total := sum(needed.values())) > device_bytes:
        listed = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in needed.items() if size)
        problem = (
            f"recurrence.steps={str(config.recurrence.steps)!r}: a training step of R = {steps} "
            f"needs at least {total / 2**30:.1f} GiB per device ({listed}), and only "
            f"{device_bytes / 2**30:.1f} GiB are usable"
        )
        fix = "use more GPUs, fewer steps, recurrence.backward_steps or a smaller "
        yield Refusal("recurrence.steps", problem, fix + "training.local_batch_size")
