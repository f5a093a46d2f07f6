"""Which collectives one training step needs, and how many bytes a rank receives through them.

Counts and bytes are those `tests/distributed/test_collectives.py` counts at the process group. Left
out: under tensor parallelism, sums over a chunk's softmax and over the gradients of norms, which
are small. Tensor parallelism without sequence parallelism is counted as if it had it.

Bytes are those a rank receives in a ring over n ranks: (n − 1)/n of the whole for a gather or a
reduce-scatter, twice that for an all-reduce. What travels over which wire is the network's matter.
"""

from dataclasses import dataclass

from titan_loop.distributed.memory import (
    MASTER_BYTES,
    REDUCE_BYTES,
    UnitParameters,
    unit_parameters,
)
from titan_loop.distributed.step_shape import StepShape
from titan_loop.models.decoder import LoopDecoder


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One kind of collective in one training step of one rank.

    Attributes:
        kind: all-gather, reduce-scatter or all-reduce.
        what: What it moves.
        count: Collectives.
        received_bytes: Bytes that all of them together bring to this rank.
    """

    kind: str
    what: str
    count: int
    received_bytes: float


def step_traffic(
    config: LoopDecoder.Config,
    shape: StepShape,
    *,
    hold_layers: bool,
    micro_batches: int = 1,
    replicas: int = 1,
) -> list[Traffic]:
    """Return what a training step sends, empty on one rank.

    Args:
        config: The architecture.
        shape: The work of one rank in one micro-batch.
        hold_layers: Whether layers stay gathered (`per_step`) or are gathered for every visit.
        micro_batches: Accumulated in a step.
        replicas: Groups of ranks that hold the same shards (HSDP).
    """
    traffic = [
        *_parameter_gathers(config, shape, hold_layers, micro_batches),
        *_gradient_reductions(config, shape, micro_batches, replicas),
        *_context_parallel(config, shape, micro_batches),
        *_tensor_parallel(config, shape, micro_batches),
    ]
    return [entry for entry in traffic if entry.count and entry.received_bytes]


def _parameter_gathers(
    config: LoopDecoder.Config, shape: StepShape, hold_layers: bool, micro_batches: int
) -> list[Traffic]:
    """Return the gathers of layers, of embedding and head, and of norm and gate."""
    units = unit_parameters(config)
    share = 1 - 1 / shape.shard_degree
    layer_bytes = share * shape.compute_bytes * units.layer / shape.tensor_parallel_degree
    padded = units.norm_and_gate_shard(shape.shard_degree) * shape.shard_degree
    norm_bytes = share * MASTER_BYTES * padded
    table_bytes = share * shape.compute_bytes * config.vocab_size * config.dim
    table_bytes /= shape.tensor_parallel_degree
    layers, norms = units.n_layers, 1
    if not hold_layers:
        layers, norms = (micro_batches * count for count in _gathers_per_visit(units, shape))
    tables = micro_batches * (3 if shape.reshard_after_forward == "always" else 2)
    return [
        Traffic(
            kind="all-gather", what="layers", count=layers, received_bytes=layers * layer_bytes
        ),
        Traffic(
            kind="all-gather",
            what="embedding, head",
            count=tables,
            received_bytes=tables * table_bytes,
        ),
        Traffic(
            kind="all-gather", what="norm, gate", count=norms, received_bytes=norms * norm_bytes
        ),
    ]


def _gathers_per_visit(units: UnitParameters, shape: StepShape) -> tuple[int, int]:
    """Return how often a micro-batch gathers layers, and norm and gate, under `per_visit`.

    | `reshard_after_forward` | a layer, forward | backward, k steps | norm and gate, forward | backward |
    |---|---|---|---|---|
    | default | R | k | 1 | all but the last visit's |
    | always | R | k | R | every visit's |
    | never | 1 | k - 1 | 1 | all but the last visit's |

    Where the backward pass ends before step 1, FSDP has fetched one layer ahead in vain.
    """  # noqa: E501  (a table row is one line)
    steps, reached = shape.recurrent_steps, shape.steps_with_backward
    norms = min(steps, reached + 1)
    if shape.reshard_after_forward == "always":
        norms += steps
    if shape.reshard_after_forward == "never":
        return units.n_layers * max(1, reached) + (0 < reached < steps), norms
    return units.n_layers * (steps + reached) + (reached < steps), norms


def _gradient_reductions(
    config: LoopDecoder.Config, shape: StepShape, micro_batches: int, replicas: int
) -> list[Traffic]:
    """Return the reductions: one per unit and micro-batch, in fp32, and one more over replicas.

    Where the backward pass ends before step 1, the embedding has no gradient, and the gate's, which
    reads all steps, is reduced before the norm's.
    """
    units = unit_parameters(config)
    truncated = 0 < shape.steps_with_backward < shape.recurrent_steps
    tables = 2 if units.embedding and not truncated else 1
    norms = 2 if truncated and config.exit_gate is not None else 1
    if shape.trainable == "all":
        counts = {"layers": units.n_layers, "embedding, head": tables, "norm, gate": norms}
    else:
        counts = {"norm, gate": 1}
    trained_here = units.gate
    if shape.trainable == "all":
        trained_here = units.norm_and_gate_shard(shape.shard_degree)
    parameters = {
        "layers": units.layer / shape.tensor_parallel_degree,
        "embedding, head": config.vocab_size * config.dim / shape.tensor_parallel_degree,
        "norm, gate": shape.shard_degree * trained_here / norms,
    }
    traffic: list[Traffic] = []
    for what, count in counts.items():
        count *= micro_batches
        whole = REDUCE_BYTES * parameters[what]
        scattered = count * whole * (1 - 1 / shape.shard_degree)
        summed = count * whole / shape.shard_degree * 2 * (1 - 1 / replicas)
        traffic.append(
            Traffic(kind="reduce-scatter", what=what, count=count, received_bytes=scattered)
        )
        traffic.append(Traffic(kind="all-reduce", what=what, count=count, received_bytes=summed))
    return traffic


def _context_parallel(
    config: LoopDecoder.Config, shape: StepShape, micro_batches: int
) -> list[Traffic]:
    """Return keys and values: gathered at every visit, again where it is recomputed."""
    degree = shape.context_parallel_degree
    attention = config.layers[0].attention
    head_dim = attention.head_dim or config.dim // attention.n_heads
    key_width = (attention.n_kv_heads or attention.n_heads) * head_dim
    window_bytes = shape.tokens * degree * 2 * key_width * shape.compute_bytes
    received = window_bytes / shape.tensor_parallel_degree * (1 - 1 / degree)
    recomputed = {"none": 0, "recurrent-step+full": 2}.get(shape.checkpointing, 1)
    layers = micro_batches * len(config.layers) * (degree > 1)
    back = layers * shape.steps_with_backward
    gathers = layers * shape.recurrent_steps + recomputed * back
    return [
        Traffic(
            kind="all-gather",
            what="keys, values",
            count=gathers,
            received_bytes=gathers * received,
        ),
        Traffic(
            kind="reduce-scatter",
            what="keys, values",
            count=back,
            received_bytes=back * received,
        ),
    ]


def _tensor_parallel(
    config: LoopDecoder.Config, shape: StepShape, micro_batches: int
) -> list[Traffic]:
    """Return the states under sequence parallelism: two gathers and two scatters a visit.

    One of each more for the embedding, and one for every readout, none of which is recomputed.
    `selective` keeps what was scattered.
    """
    degree = shape.tensor_parallel_degree
    received = shape.tokens * config.dim * shape.compute_bytes * (1 - 1 / degree)
    times = micro_batches * (degree > 1)
    recomputed = {"none": 0, "recurrent-step+full": 2}.get(shape.checkpointing, 1)
    back = shape.steps_with_backward
    embedding_back = back == shape.recurrent_steps
    once = {
        "all-gather": shape.recurrent_steps + embedding_back,
        "reduce-scatter": 1 + back,
    }
    traffic: list[Traffic] = []
    for kind, others in once.items():
        again = 0 if (kind, shape.checkpointing) == ("reduce-scatter", "selective") else recomputed
        visits = 2 * len(config.layers) * (shape.recurrent_steps + (1 + again) * back)
        count = times * (visits + others)
        traffic.append(
            Traffic(kind=kind, what="states", count=count, received_bytes=count * received)
        )
    return traffic
