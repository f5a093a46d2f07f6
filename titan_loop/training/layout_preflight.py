"""Reasons why a run cannot be spread over its ranks: parallelism and batches that do not fit."""

import math
from collections.abc import Iterator
from functools import partial

from titan_loop.distributed.activation_checkpointing import check_recomputation
from titan_loop.distributed.parallelize import check_parallelism
from titan_loop.errors import Refusal, caught
from titan_loop.models.decoder import LoopDecoder
from titan_loop.training.batch_schedule import batch_sizes
from titan_loop.training.config import RunConfig

_WORTH_SPLITTING = 4096
"""Least tokens of a window that a rank should have under context parallelism."""


def layout_refusals(
    config: RunConfig, model: LoopDecoder.Config, world_size: int
) -> Iterator[Refusal]:
    """Yield degrees of parallelism that do not fit the model, the window or the ranks.

    `config` has no `value_refusals`.
    """
    parallel, attention = config.parallelism, model.layers[0].attention

    def check_degrees() -> None:
        check_parallelism(
            parallel,
            world_size=world_size,
            n_heads=attention.n_heads,
            n_kv_heads=attention.n_kv_heads or attention.n_heads,
            seq_len=config.training.seq_len,
            attention=config.model.attention,
        )

    def check_model() -> None:
        model.check_spreading(
            tensor_parallel=parallel.tensor_parallel_degree,
            context_parallel=parallel.context_parallel_degree,
            expert_parallel=parallel.expert_parallel_degree,
        )

    yield from caught("parallelism", check_degrees)
    yield from caught("parallelism", check_model)
    yield from caught("fsdp", lambda: config.fsdp.check(parallel))
    recomputed = config.activation_checkpoint
    check = partial(check_recomputation, recomputed, parallel, draws=model.draws)
    yield from caught("activation_checkpoint", check)


def batch_refusals(config: RunConfig, world_size: int) -> Iterator[Refusal]:
    """Yield a batch of the schedule that does not split over the ranks.

    `config` has no `value_refusals` and `layout_refusals`.
    """
    parallel, training = config.parallelism, config.training
    degree, tp = parallel.context_parallel_degree, parallel.tensor_parallel_degree
    sizes = batch_sizes(config.batch, training.seq_len, config.total_tokens)

    def windows_per_pass(context_degree: int) -> int:
        return training.local_batch_size * max(1, world_size // (tp * context_degree))

    def uneven(context_degree: int) -> list[int]:
        per_pass = windows_per_pass(context_degree)
        return [windows for windows in sorted(sizes) if windows % per_pass]

    if not uneven(degree):
        return
    per_pass = windows_per_pass(degree)
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
        if world_size % (larger * others) == 0 and not uneven(larger):
            fixes.append(f"--parallelism.context-parallel-degree {larger}")
            break
    yield Refusal(
        "batch.global_batch_tokens",
        f"a global batch of {uneven(degree)[0]} windows does not divide by local_batch_size="
        f"{training.local_batch_size} × {world_size // (tp * degree)} data-parallel ranks",
        f"use {', or '.join(fixes)}",
    )
