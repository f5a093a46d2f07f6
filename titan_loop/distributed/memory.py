"""How many bytes one rank needs in a training step, by part: an estimate with its terms stated.

    persistent     parameters 4·P/S, sharded gradients 4·P/S, AdamW's moments 8·P/S; Muon's 4·P/S of
                   the layers' matrices, an average of the weights 4·P/S
    gathered       per_step: all layers; per_visit: the layer at work, the one fetched ahead, and
                   the buffer it arrives in, but all layers where a whole recurrent step is
                   recomputed, since its backward pass follows at once, or where units are not
                   resharded after forward (until the backward pass of step R, the embedding, too)
    activations    every visit of every layer, see `visit_bytes_per_token`; with `full-offload` the
                   visits' part is in the host's memory, `offloaded`
    recomputed     one layer's activations again, with checkpointing; all layers' if the unit of
                   recomputation is a recurrent step
    readout        one chunk of logits, the head's fp32 gradient, the gradients of R states
    gradients      unsharded, of *all* layers once R > 1, under any policy: autograd adds up the R
                   contributions to a weight, so none is complete before step 1's backward

They do not peak together. Activations are complete when the loss is read out; the layers' gradients
are there when the backward of step R ends, with 1/R of the activations freed; the embedding's come
last. The peak is the largest of these three moments. Left out: allocator fragmentation, NCCL's and
the CUDA context's own memory, attention masks, temporaries of single kernels, and what Muon
exchanges once activations are gone.

With `training.enable_cpu_offload` parameters, sharded gradients and moments count as `offloaded`.

When only the last k steps are trained through, the others keep nothing but their state. When only
the gate trains, no layer keeps anything, and gradients and moments are the gate's.

P parameters, S ranks that shard them, c bytes of the compute dtype, D width, F feed-forward width,
N·H query and K·H key-value width, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torchtitan.models.common.attention import GQAttention

from titan_loop.distributed.activation_checkpointing import Checkpointing
from titan_loop.distributed.step_shape import StepShape
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.readout import LMHead
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
    steps_with_backward: int

    @property
    def persistent(self) -> float:
        """Bytes that stay from step to step, sharded gradients included."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def transient_peak(self) -> float:
        """Bytes beyond the persistent ones at the worst of the three moments."""
        left = 1 - 1 / max(1, self.steps_with_backward)
        later = max(
            self.activations * left + self.recomputed + self.unsharded_gradients,
            self.embedding_gradient,
        )
        return max(
            self.gathered + self.activations + self.readout,
            self.gathered_later + later,
        )

    @property
    def peak(self) -> float:
        """Bytes at the worst moment."""
        return self.persistent + self.transient_peak


def unit_sizes(config: LoopDecoder.Config) -> list[UnitSize]:
    """Count the parameters of each unit from the architecture alone."""
    return _measured(config)[0]


def _measured(config: LoopDecoder.Config) -> tuple[list[UnitSize], int]:
    """Return the units' parameters, and how many elements Muon would update."""
    key = f"{type(config).__qualname__} {config.architecture()}"
    if key not in _measurements:
        with torch.device("meta"):
            model = config.build()
        hidden_matrices = sum(
            parameter.numel()
            for name, parameter in model.named_parameters()
            if model.parameter_group(name, parameter).is_hidden_matrix
        )
        _measurements[key] = unit_sizes_of(model, model.units()), hidden_matrices
    return _measurements[key]


_measurements: dict[str, tuple[list[UnitSize], int]] = {}


def visit_bytes_per_token(
    config: LoopDecoder.Config, shape: StepShape, checkpointing: Checkpointing
) -> float:
    """Return what one visit of one layer keeps for its backward pass, in bytes per token.

    | policy | kept, in elements of the compute dtype |
    |---|---|
    | none | inputs of q, k, v and of w1, w3: 2·D; rotated q, k, v and attention's output: 2·N·H + 2·K·H; w1, w3, SiLU and their product: 4·F; four norms' own |
    | selective | the layer's input and the second product of w2: 2·D; q, v and attention's output: 2·N·H + K·H; w1: F |
    | full | the layer's input: D |
    | full-offload | nothing: the layer's input, D, is on the host |
    | recurrent-step | nothing: the step's input is the state before it |
    | recurrent-step+full | nothing, likewise |

    Under context parallelism attention keeps the gathered keys and values unless they are gathered
    again. A fused norm keeps its input (D), a composed one that and the normalised value in fp32 (8·D
    bytes). Attention also keeps an fp32 log-sum-exp per head.

    Args:
        config: The architecture.
        shape: Dtype, kernels and tensor parallelism, which divides all but the gathered inputs.
        checkpointing: The policy, not necessarily that of `shape`.
    """  # noqa: E501  (a table row is one line)
    queries, keys, feed_forward = _widths(config)
    c, tp = shape.compute_bytes, shape.tensor_parallel_degree
    log_sum_exp = 4 * config.layers[0].attention.n_heads / tp
    if checkpointing.startswith("recurrent-step") or checkpointing == "full-offload":
        return 0.0
    if checkpointing == "full":
        return c * config.dim / tp
    if checkpointing == "selective":
        return c * (2 * config.dim + 2 * queries + keys + feed_forward) / tp + log_sum_exp
    gathered_keys = 2 * keys * shape.context_parallel_degree
    products = c * (2 * queries + gathered_keys + 4 * feed_forward) / tp
    gathered_inputs = c * 2 * config.dim
    return gathered_inputs + products + 4 * _norm_bytes(config, shape) + log_sum_exp


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
    sizes, hidden_matrices = _measured(config)
    small = [size for size in sizes if size.unit.fp32]
    tables = [size.parameters() / tp for size in sizes if size.unit.name == TABLES]
    blocks = [
        size.parameters() / tp for size in sizes if not size.unit.fp32 and size.unit.name != TABLES
    ]
    small_shard = sum(size.shard(shape.shard_degree) for size in small)
    local = MASTER_BYTES * ((sum(tables) + sum(blocks)) / shape.shard_degree + small_shard)
    trained_local = local
    if shape.trainable == "exit_gate":
        trained = sum(size.shard(shape.shard_degree, shape.trainable) for size in sizes)
        trained_local = MASTER_BYTES * trained
    states = (2 + shape.states.averaged) * trained_local
    if shape.states.muon:
        states -= MASTER_BYTES * hidden_matrices / (shape.shard_degree * tp)
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
    readout_chunk = _readout_chunk_bytes(config, shape)
    reduction = REDUCE_BYTES * (1 + 1 / shape.shard_degree)
    return StepMemory(
        parameters=on_device * local,
        gradients=on_device * trained_local,
        optimizer=on_device * states,
        gathered=c * at_once + others,
        gathered_later=c * later + others,
        activations=_activation_bytes(config, shape),
        offloaded=_offloaded_bytes(config, shape)
        + (1 - on_device) * (local + trained_local + states),
        recomputed=_recomputed_bytes(config, shape),
        readout=readout_chunk + _readout_rest_bytes(config, shape),
        readout_chunk=readout_chunk,
        unsharded_gradients=summed_bytes * summed_at_once(trained_blocks)
        + reduction * max(trained_blocks),
        embedding_gradient=(c + reduction) * embedding_trained,
        steps_with_backward=shape.steps_with_backward,
    )


def _activation_bytes(config: LoopDecoder.Config, shape: StepShape) -> float:
    visit = visit_bytes_per_token(config, shape, shape.checkpointing)
    # The state is kept for the readout, and the gate's input in fp32.
    state = shape.compute_bytes * config.dim
    gate = MASTER_BYTES * config.dim if config.exit_gate and shape.compute_bytes < 4 else 0
    by_step = shape.checkpointing.startswith("recurrent-step")
    norm = 0.0 if by_step else _norm_bytes(config, shape)
    layers = shape.steps_with_backward * (len(config.layers) * visit + norm)
    injected = 0.0
    if config.injection is not None:  # the embedding, and h - e of every step for learned rates
        injected = state
        if config.injection.kind == "diagonal" and not by_step:
            injected += shape.steps_with_backward * MASTER_BYTES * config.dim
        injected /= shape.tensor_parallel_degree
    return shape.tokens * (layers + injected + shape.recurrent_steps * (state + gate))


def _offloaded_bytes(config: LoopDecoder.Config, shape: StepShape) -> float:
    if shape.checkpointing != "full-offload":
        return 0.0
    visits = shape.steps_with_backward * len(config.layers)
    return visits * shape.tokens * visit_bytes_per_token(config, shape, "full")


def _recomputed_bytes(config: LoopDecoder.Config, shape: StepShape) -> float:
    if shape.checkpointing == "none" or shape.steps_with_backward == 0:
        return 0.0
    layer = visit_bytes_per_token(config, shape, "none")
    if shape.checkpointing == "recurrent-step":
        layer = len(config.layers) * layer + _norm_bytes(config, shape)
    if shape.checkpointing == "recurrent-step+full":
        layer += len(config.layers) * visit_bytes_per_token(config, shape, "full")
        layer += _norm_bytes(config, shape)
    return shape.tokens * layer


def _readout_chunk_bytes(config: LoopDecoder.Config, shape: StepShape) -> float:
    """Return the bytes of the logits that exist at a time: see `models/readout.py`."""
    c, rows = shape.compute_bytes, config.vocab_size / shape.tensor_parallel_degree
    head_config = config.lm_head
    assert isinstance(head_config, LMHead.Config)
    chunk = min(head_config.chunk_tokens, shape.tokens)
    return chunk * rows * (4 + (c if c < 4 else 0))


def _readout_rest_bytes(config: LoopDecoder.Config, shape: StepShape) -> float:
    """Return the gathered head, its fp32 gradient and the gradients of the states read out."""
    c, rows = shape.compute_bytes, config.vocab_size / shape.tensor_parallel_degree
    if shape.trainable == "exit_gate":
        return rows * config.dim * c
    readouts = shape.recurrent_steps if config.exit_gate is not None else 1
    head = rows * config.dim * (c + REDUCE_BYTES)
    return head + readouts * shape.tokens * config.dim * c


def _norm_bytes(config: LoopDecoder.Config, shape: StepShape) -> float:
    per_value = shape.compute_bytes if shape.fused_norms else 2 * 4
    return per_value * config.dim / shape.tensor_parallel_degree


def _widths(config: LoopDecoder.Config) -> tuple[int, int, int]:
    """Return N·H, K·H and F of the layers, which are all alike."""
    attention, feed_forward = config.layers[0].attention, config.layers[0].feed_forward
    assert isinstance(attention, GQAttention.Config)
    assert feed_forward is not None
    head_dim = attention.head_dim or config.dim // attention.n_heads
    kv_heads = attention.n_kv_heads or attention.n_heads
    return attention.n_heads * head_dim, kv_heads * head_dim, feed_forward.w1.out_features
