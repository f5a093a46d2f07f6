"""Why a run cannot be spread over its ranks: parallelism that does not fit, uneven batches."""

import math
from collections.abc import Iterator

from titan_loop.distributed.activation_checkpointing import check_recomputation
from titan_loop.distributed.parallelize import check_parallelism
from titan_loop.errors import Refusal, caught
from titan_loop.models.decoder import LoopDecoder
from titan_loop.training.batch_schedule import batch_sizes
from titan_loop.training.config import RunConfig

_WORTH_SPLITTING = 4096
"""Tokens of a window that a rank should have under context parallelism, at least."""


def layout_refusals(
    config: RunConfig, model: LoopDecoder.Config, world_size: int
) -> Iterator[Refusal]:
    """Yield degrees of parallelism that do not fit the model, the window or the ranks.

    `config` has no `value_refusals`, and `model` is its architecture.
    """
    attention = model.layers[0].attention
    yield from caught(
        "parallelism",
        lambda: check_parallelism(
            config.parallelism,
            world_size=world_size,
            n_heads=attention.n_heads,
            n_kv_heads=attention.n_kv_heads or attention.n_heads,
            seq_len=config.training.seq_len,
            attention=config.model.attention,
        ),
    )
    yield from caught(
        "parallelism",
        lambda: model.check_spreading(
            tensor_parallel=config.parallelism.tensor_parallel_degree,
            context_parallel=config.parallelism.context_parallel_degree,
            expert_parallel=config.parallelism.expert_parallel_degree,
        ),
    )
    yield from caught("fsdp", lambda: config.fsdp.check(config.parallelism))
    yield from caught(
        "activation_checkpoint",
        lambda: check_recomputation(
            config.activation_checkpoint, config.parallelism, draws=model.draws
        ),
    )


def batch_refusals(config: RunConfig, world_size: int) -> Iterator[Refusal]:
    """Yield a batch that some point of the schedule cannot split over the ranks.

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
        fixes.append(
            f"--batch.global-batch-tokens of multiples of {per_pass * training.seq_len:,} tokens"
        )
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
