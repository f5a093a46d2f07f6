"""An estimate of the bytes that one rank needs in a training step, term by term.

    persistent     parameters 4·P/S, sharded gradients 4·P/S, AdamW's moments 8·P/S; Muon's 4·P/S of
                   the layers' matrices, an average of the weights 4·P/S
    gathered       per_step: all layers; per_visit: the layer at work, the one fetched ahead, and
                   the buffer it arrives in, but all layers where a whole recurrent step is
                   recomputed, since its backward pass follows at once, or where units are not
                   resharded after forward (until the backward pass of step R, the embedding, too)
    activations    every visit of every layer, see `models/memory_parts.py`; with `full-offload` the
                   visits' part is in the host's memory, `offloaded`
    recomputed     one layer's activations again, with checkpointing; all layers' if the unit of
                   recomputation is a recurrent step
    readout        one chunk of logits, the head's fp32 gradient, the gradients of R states
    gradients      unsharded, of *all* layers once R > 1, under any policy: autograd adds up the R
                   contributions to a weight, so none is complete before step 1's backward

They do not peak together. Activations are complete when the loss is read out; the layers' gradients
are there when the backward of step R ends, with 1/R of the activations freed; the embedding's come
then; what Muon exchanges and works in comes last. The peak is the largest of these four moments.
Left out: allocator fragmentation, NCCL's and the CUDA context's own memory, attention masks, and
temporaries of single kernels.

With `training.enable_cpu_offload` parameters, sharded gradients and moments count as `offloaded`.

When only the last k steps are trained through, the others keep nothing but their state. When only
the gate trains, no layer keeps anything, and gradients and moments are the gate's.

What a token leaves behind is the decoder's to say (`Config.memory_parts`); P parameters, S ranks
that shard them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from titan_loop.distributed.activation_checkpointing import Checkpointing
from titan_loop.distributed.muon import update_needs
from titan_loop.distributed.step_shape import StepShape
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.exit_gate import Trainable
from titan_loop.models.memory_parts import MemoryPart
from titan_loop.models.units import TABLES, UnitSize, unit_sizes_of

USABLE_SHARE = 0.9  # of a device's memory; the rest is fragmentation, NCCL's and the context's
MASTER_BYTES = 4  # sharded parameters and gradients, and each of AdamW's two moments
REDUCE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of one rank by part; see the module's docstring for when they are alive.

    Attributes:
        parameters: Sharded, fp32.
        gradients: Sharded, fp32.
        optimizer: Moments and the average of the weights, sharded, fp32.
        gathered: Unsharded weights at the end of the forward pass, without the head.
        gathered_later: The same once the backward pass of step R is over.
        activations: Saved for the backward pass by all visits.
        offloaded: What is in the memory of the host, not the device; part of no peak.
        recomputed: Activations of the layer that is being recomputed.
        readout: Alive while the streamed loss is computed, the gathered head included.
        readout_chunk: The part of `readout` that is logits.
        unsharded_gradients: Layers' gradients before they are reduced, and one layer's reduction
            buffers.
        embedding_gradient: Unsharded, with its reduction buffer.
        update: Exchanged and worked in by Muon.
        steps_with_backward: Recurrent steps that the backward pass reaches.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    gathered_later: float
    activations: float
    offloaded: float
    recomputed: float
    readout: float
    readout_chunk: float
    unsharded_gradients: float
    embedding_gradient: float
    update: float
    steps_with_backward: int

    @property
    def persistent(self) -> float:
        """Bytes that stay from step to step, sharded gradients included."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def transient_peak(self) -> float:
        """Bytes beyond the persistent ones at the worst of the four moments."""
        left = 1 - 1 / max(1, self.steps_with_backward)
        later = max(
            self.activations * left + self.recomputed + self.unsharded_gradients,
            self.embedding_gradient,
        )
        return max(
            self.gathered + self.activations + self.readout,
            self.gathered_later + later,
            self.update,
        )

    @property
    def peak(self) -> float:
        """Bytes at the worst moment."""
        return self.persistent + self.transient_peak


def unit_sizes(config: LoopDecoder.Config) -> list[UnitSize]:
    """Count the parameters of each unit from the architecture alone."""
    return _measured(config)[0]


def hidden_matrices(config: LoopDecoder.Config) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices that Muon would update."""
    return _measured(config)[1]


def _measured(config: LoopDecoder.Config) -> tuple[list[UnitSize], list[tuple[int, ...]]]:
    key = f"{type(config).__qualname__} {config.architecture()}"
    if key not in _measurements:
        with torch.device("meta"):
            model = config.build()
        hidden = [
            tuple(parameter.shape)
            for name, parameter in model.named_parameters()
            if model.parameter_group(name, parameter).is_hidden_matrix
        ]
        _measurements[key] = unit_sizes_of(model, model.units()), hidden
    return _measurements[key]


_measurements: dict[str, tuple[list[UnitSize], list[tuple[int, ...]]]] = {}


def shard_elements(size: UnitSize, shape: StepShape, trainable: Trainable = "all") -> float:
    """Return the elements of a unit that a rank holds, padding included.

    Padding of what tensor parallelism cuts is not counted.
    """
    if size.unit.fp32 or shape.tensor_parallel_degree == 1:
        return size.shard(shape.shard_degree, trainable)
    return size.parameters(trainable) / shape.tensor_parallel_degree / shape.shard_degree


def estimate_memory(
    config: LoopDecoder.Config, shape: StepShape, *, hold_layers: bool
) -> StepMemory:
    """Estimate a rank's memory in a training step with the streamed loss.

    Args:
        config: The architecture.
        shape: The work of one rank.
        hold_layers: Whether layers stay gathered (`per_step`) or are gathered for every visit.
    """
    c, tp = shape.compute_bytes, shape.tensor_parallel_degree
    sizes = unit_sizes(config)
    small = [size for size in sizes if size.unit.fp32]
    tables = [size.parameters() / tp for size in sizes if size.unit.name == TABLES]
    blocks = [
        size.parameters() / tp for size in sizes if not size.unit.fp32 and size.unit.name != TABLES
    ]
    small_shard = sum(size.shard(shape.shard_degree) for size in small)
    local, trained_local = (
        MASTER_BYTES * sum(shard_elements(size, shape, trained) for size in sizes)
        for trained in ("all", shape.trainable)
    )
    states = (2 + shape.states.averaged) * trained_local
    update = 0.0
    if shape.states.muon_bytes:
        hidden = hidden_matrices(config)
        states -= MASTER_BYTES * sum(map(math.prod, hidden)) / (shape.shard_degree * tp)
        held = update_needs(hidden, shards=shape.shard_degree, slices=tp).held
        update = shape.states.muon_bytes * held
    on_device = 0 if shape.parameters_on_host else 1
    summed_bytes = REDUCE_BYTES if shape.fp32_visit_sum else c
    by_step = shape.checkpointing.startswith("recurrent-step") and shape.steps_with_backward > 0
    never = shape.reshard_after_forward == "never"
    all_later = hold_layers or by_step or (never and shape.steps_with_backward == 0)
    at_once, later = (
        sum(blocks) if every else 3 * max(blocks) for every in (all_later or never, all_later)
    )
    others = MASTER_BYTES * small_shard * shape.shard_degree
    if never:
        others += c * sum(
            size.parameters() / tp for size in sizes if size.unit.backward_visits == 0
        )
    trained_blocks = blocks if shape.trainable == "all" else [0.0]
    summed_at_once = sum if shape.steps_with_backward > 1 else max
    embedding_trained = tables[0] if shape.trainable == "all" else 0.0
    parts = config.memory_parts(shape)
    readout = config.readout_memory(shape.tokens, shape.recurrent_steps, shape)
    # The gathered head and, if it trains, its fp32 gradient and those of the states that are read.
    readout_rest = readout.head_elements * c
    if shape.trainable == "all":
        readout_rest += readout.head_elements * REDUCE_BYTES + readout.state_gradient_bytes
    reduction = REDUCE_BYTES * (1 + 1 / shape.shard_degree)
    return StepMemory(
        parameters=on_device * local,
        gradients=on_device * trained_local,
        optimizer=on_device * states,
        gathered=c * at_once + others,
        gathered_later=c * later + others,
        activations=_activation_bytes(parts, shape),
        offloaded=_offloaded_bytes(parts, shape)
        + (1 - on_device) * (local + trained_local + states),
        recomputed=_recomputed_bytes(parts, shape),
        readout=readout.chunk_bytes + readout_rest,
        readout_chunk=readout.chunk_bytes,
        unsharded_gradients=summed_bytes * summed_at_once(trained_blocks)
        + reduction * max(trained_blocks),
        embedding_gradient=(c + reduction) * embedding_trained,
        update=update,
        steps_with_backward=shape.steps_with_backward,
    )


def _activation_bytes(parts: Sequence[MemoryPart], shape: StepShape) -> float:
    kept = sum(_visits(part, shape) * _kept(part, shape.checkpointing) for part in parts)
    return shape.tokens * kept


def _offloaded_bytes(parts: Sequence[MemoryPart], shape: StepShape) -> float:
    if shape.checkpointing != "full-offload":
        return 0.0
    layers = [part for part in parts if part.recomputed == "layer"]
    return shape.tokens * sum(_visits(part, shape) * part.kept.input for part in layers)


def _recomputed_bytes(parts: Sequence[MemoryPart], shape: StepShape) -> float:
    if shape.checkpointing == "none" or shape.steps_with_backward == 0:
        return 0.0
    layer = max(part.kept.whole for part in parts if part.recomputed == "layer")
    if not shape.checkpointing.startswith("recurrent-step"):
        return shape.tokens * layer
    step = [part for part in parts if part.visited == "step" and part.recomputed != "never"]
    if shape.checkpointing == "recurrent-step":
        return shape.tokens * sum(part.visits * part.kept.whole for part in step)
    return shape.tokens * (layer + sum(part.visits * _kept(part, "full") for part in step))


def _visits(part: MemoryPart, shape: StepShape) -> int:
    times = {
        "once": min(1, shape.steps_with_backward),
        "step": shape.steps_with_backward,
        "state": shape.recurrent_steps,
    }
    if part.recomputed == "layer" and shape.steps_with_backward == 0:
        return 0
    return part.visits * times[part.visited]


def _kept(part: MemoryPart, checkpointing: Checkpointing) -> float:
    """Return bytes per token of one visit: the table of `models/memory_parts.py`."""
    by_step = checkpointing.startswith("recurrent-step")
    if part.recomputed == "never" or (part.recomputed == "step" and not by_step):
        return part.kept.whole
    whole, selected, layer_input = part.kept
    return {"none": whole, "selective": selected, "full": layer_input}.get(checkpointing, 0.0)
