"""A lower bound of a run's memory: weights, gradients, moments and a state for a recorded visit.

Recomputation keeps these states, too; without it a visit keeps many times as much. Peaks come from
the rehearsal in `titan_loop/planning`.
"""

from collections.abc import Iterator

from torchtitan.config import TORCH_DTYPE_MAP

from titan_loop.distributed.activation_checkpointing import checkpointing_of
from titan_loop.distributed.state_bytes import StateBytes, state_bytes
from titan_loop.errors import Refusal
from titan_loop.models.decoder import LoopDecoder
from titan_loop.training.config import RunConfig
from titan_loop.training.depth_schedule import most_recurrent_steps


def run_states(config: RunConfig, model: LoopDecoder.Config, ranks: int) -> StateBytes:
    """Return the bytes of weights, gradients and moments on one of so many ranks."""
    tensor_parallel = config.parallelism.tensor_parallel_degree
    replicas = config.parallelism.data_parallel_replicate_degree
    return state_bytes(
        model,
        shards=max(1, ranks // (replicas * tensor_parallel)),
        tensor_parallel=tensor_parallel,
        trainable=config.trainable,
        muon=config.optimizer.name == "muon",
        averaged=config.ema.decay > 0,
    )


def memory_refusals(
    config: RunConfig, model: LoopDecoder.Config, ranks: int, device_bytes: float
) -> Iterator[Refusal]:
    """Yield a refusal if a step at the largest R cannot fit a device; `config` has no other."""
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
    total = sum(needed.values())
    if total > device_bytes:
        listed = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in needed.items() if size)
        problem = (
            f"recurrence.steps={str(config.recurrence.steps)!r}: a training step of R = {steps} "
            f"needs at least {total / 2**30:.1f} GiB of a device, {device_bytes / 2**30:.1f} are "
            f"usable ({listed})"
        )
        fix = "use more GPUs, fewer steps, recurrence.backward_steps or a smaller "
        yield Refusal("recurrence.steps", problem, fix + "training.local_batch_size")
