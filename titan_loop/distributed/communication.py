"""The collectives of one training step, and the bytes that a rank receives through them.

Counts and bytes are those `tests/distributed/test_collectives.py` counts at the process group. Left
out: under tensor parallelism, sums over a chunk's softmax and over the gradients of norms, which
are small. Tensor parallelism without sequence parallelism is counted as if it had it.

Bytes are those a rank receives in a ring over n ranks: (n − 1)/n of the whole for a gather or a
reduce-scatter, twice that for an all-reduce; in Muon's all-to-all, what others send to the rank
that owns the most expensive matrix. What travels over which wire is the network's matter.
"""

from dataclasses import dataclass, replace

from titan_loop.distributed.memory import (
    MASTER_BYTES,
    REDUCE_BYTES,
    hidden_matrices,
    shard_elements,
    unit_sizes,
)
from titan_loop.distributed.muon import update_needs
from titan_loop.distributed.step_shape import StepShape
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.readout import LMHead
from titan_loop.models.soft_decode import kept_chunks
from titan_loop.models.units import OUTSIDE, UnitSize


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One kind of collective in one training step of one rank.

    Attributes:
        kind: all-gather, reduce-scatter, all-reduce or all-to-all.
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
        *_muon(config, shape),
    ]
    return [entry for entry in traffic if entry.count and entry.received_bytes]


def _parameter_gathers(
    config: LoopDecoder.Config, shape: StepShape, hold_layers: bool, micro_batches: int
) -> list[Traffic]:
    """Return the gathers of the units; under `per_step` what steps visit is gathered once a step.

    | `reshard_after_forward` | a layer, forward | backward, k steps | norm and gate, forward | backward |
    |---|---|---|---|---|
    | default | R | k | 1 | all but the last visit's |
    | always | R | k | R | every visit's |
    | never | 1 | k - 1 | 1 | all but the last visit's |

    Where the backward pass ends before step 1, FSDP has fetched one layer ahead in vain.
    """  # noqa: E501  (a table row is one line)
    steps, reached = shape.recurrent_steps, shape.steps_with_backward
    never = shape.reshard_after_forward == "never"
    reaches_start = config.reaches_start(steps, reached)
    reads_once = config.coda_layers > 0 and config.exit_gate is None
    between = any(size.unit.between for size in unit_sizes(config))  # then those are fetched
    in_vain = reached < steps and not between and not (never and reached == 0)
    traffic: list[Traffic] = []
    for size in _ordered(config):
        unit = size.unit
        visited, back = unit.visited(steps), unit.visited_back(reached)
        if unit.name == OUTSIDE:  # a coda has a backward pass for every state, or none at all
            back = visited * (reaches_start if unit.place == "before" else reached > 0)
        if unit.kept and unit.place == "step":
            visited += reads_once  # the norm, once more
            # Where it ends early it comes to one more.
            back = min(visited, back + max(unit.visits, unit.between))
        kept = unit.kept and shape.reshard_after_forward != "always"
        count = max(1, back) if kept or (never and not unit.kept) else visited + back
        if unit.place == "step" and not unit.kept:
            count, in_vain = count + in_vain, False
        count *= micro_batches
        if hold_layers and unit.is_revisited:
            count = 1
        count *= visited > 0
        received = count * _elements(size, shape) * (1 - 1 / shape.shard_degree)
        received *= MASTER_BYTES if unit.fp32 else shape.compute_bytes
        traffic.append(
            Traffic(kind="all-gather", what=unit.name, count=count, received_bytes=received)
        )
    return _summed(traffic)


def _gradient_reductions(
    config: LoopDecoder.Config, shape: StepShape, micro_batches: int, replicas: int
) -> list[Traffic]:
    """Return the reductions: one per unit and micro-batch, in fp32, and one more over replicas.

    Where the backward pass ends before step 1, what is visited before it has no gradient, and what
    reads all states is reduced before the rest of its unit.
    """
    steps, reached = shape.recurrent_steps, shape.steps_with_backward
    truncated = 0 < reached < steps
    reaches_start = reached == 0 or config.reaches_start(steps, reached)
    traffic: list[Traffic] = []
    for size in _ordered(config):
        unit = size.unit
        if size.parameters(shape.trainable) == 0 or (unit.place == "before" and not reaches_start):
            continue
        count = micro_batches * unit.reductions
        if truncated:
            count = micro_batches * (2 if unit.reads_all_states else 1)
        whole = micro_batches * REDUCE_BYTES * _elements(size, shape, trained=True)
        scattered = whole * (1 - 1 / shape.shard_degree)
        summed = whole / shape.shard_degree * 2 * (1 - 1 / replicas)
        for kind, received in (("reduce-scatter", scattered), ("all-reduce", summed)):
            traffic.append(Traffic(kind=kind, what=unit.name, count=count, received_bytes=received))
    return _summed(traffic)


def _ordered(config: LoopDecoder.Config) -> list[UnitSize]:
    """Return the units in the order of `plan`: of every step, the others, the small ones."""
    return sorted(unit_sizes(config), key=lambda size: (size.unit.fp32, size.unit.place != "step"))


def _elements(size: UnitSize, shape: StepShape, *, trained: bool = False) -> float:
    """Return the elements of a unit that travel in one collective, with those that are padding."""
    return shape.shard_degree * shard_elements(size, shape, shape.trainable if trained else "all")


def _summed(traffic: list[Traffic]) -> list[Traffic]:
    """Return one entry for all units of one name."""
    entries: dict[tuple[str, str], Traffic] = {}
    for entry in traffic:
        key = (entry.kind, entry.what)
        before = entries.get(key, replace(entry, count=0, received_bytes=0.0))
        entries[key] = replace(
            entry,
            count=before.count + entry.count,
            received_bytes=before.received_bytes + entry.received_bytes,
        )
    return list(entries.values())


def _context_parallel(
    config: LoopDecoder.Config, shape: StepShape, micro_batches: int
) -> list[Traffic]:
    """Return keys and values: gathered at every visit, again where it is recomputed."""
    degree = shape.context_parallel_degree
    key_width = config.layers[0].attention.widths[1]
    window_bytes = shape.tokens * degree * 2 * key_width * shape.compute_bytes
    received = window_bytes / shape.tensor_parallel_degree * (1 - 1 / degree)
    recomputed = {"none": 0, "recurrent-step+full": 2}.get(shape.checkpointing, 1)
    visits = config.layer_visits(shape.recurrent_steps, shape.steps_with_backward)
    forward, back = (int(micro_batches * (degree > 1) * count) for count in visits)
    gathers = forward + recomputed * back
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
    visits = config.layer_visits(shape.recurrent_steps, back)
    once = {
        "all-gather": shape.recurrent_steps + embedding_back,
        "reduce-scatter": 1 + back,
    }
    traffic: list[Traffic] = []
    for kind, others in once.items():
        again = 0 if (kind, shape.checkpointing) == ("reduce-scatter", "selective") else recomputed
        count = times * int(2 * (visits.forward + (1 + again) * visits.backward) + others)
        if config.decodes is not None:  # a state is gathered, what it decodes to scattered
            count += times * (shape.recurrent_steps - 1 + min(back, shape.recurrent_steps - 1))
        traffic.append(
            Traffic(kind=kind, what="states", count=count, received_bytes=count * received)
        )
    return [*traffic, *_kept_tokens(config, shape, times)]


def _muon(config: LoopDecoder.Config, shape: StepShape) -> list[Traffic]:
    """Return the two exchanges of an update: parts go to the owners of matrices and come back."""
    states, shards, slices = shape.states, shape.shard_degree, shape.tensor_parallel_degree
    if not states.muon_bytes or shards * slices == 1:
        return []
    received = update_needs(hidden_matrices(config), shards=shards, slices=slices).received
    return [
        Traffic(
            kind="all-to-all",
            what="Muon",
            count=2,
            received_bytes=states.muon_bytes * received,
        )
    ]


def _kept_tokens(config: LoopDecoder.Config, shape: StepShape, times: int) -> list[Traffic]:
    """Return the largest logits of every rank and their ids, which decoding to K tokens gathers."""
    decoding, head = config.decodes, config.lm_head
    if decoding is None or decoding.top_k is None:
        return []
    assert isinstance(head, LMHead.Config)
    rows = -(-config.vocab_size // shape.tensor_parallel_degree)
    chunks = kept_chunks(decoding.top_k, int(shape.tokens), head.chunk_tokens, (rows, config.dim))
    others = shape.tensor_parallel_degree - 1
    pairs = others * shape.tokens * min(decoding.top_k, rows)
    between = times * (shape.recurrent_steps - 1)
    return [
        Traffic(
            kind="all-gather",
            what="kept tokens",
            count=between * len(chunks),
            received_bytes=between * pairs * 2 * REDUCE_BYTES,
        )
    ]
