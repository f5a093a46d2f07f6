"""The work of one rank in one micro-batch, on which memory, traffic and FSDP's policy depend.

Training derives it from its ranks and device, `plan` from a cluster that is not there; both decide
`fsdp.policy=auto` here.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from titan_loop.compat import DeviceType
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

from titan_loop.distributed.activation_checkpointing import Checkpointing, checkpointing_of
from titan_loop.models.exit_gate import Trainable

ReshardAfterForward = Literal["default", "always", "never"]


class OptimizerStates(NamedTuple):
    """What the optimisers keep for every parameter that trains.

    Attributes:
        muon_bytes: Bytes of a value in Muon's exchanges, if hidden matrices have its one moment
            instead of AdamW's two; else 0.
        averaged: Whether there is an average of the weights.
    """

    muon_bytes: int = 0
    averaged: bool = False


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The work of one rank in one micro-batch, and how the model is spread.

    Attributes:
        windows: Number of windows of one micro-batch on one rank.
        seq_len: Tokens of a whole window.
        recurrent_steps: R.
        checkpointing: Activation checkpointing policy.
        compute_bytes: Bytes of a parameter in the forward pass: 2 for bf16, 4 for fp32.
        shard_degree: Number of ranks that share the parameters; replicas of HSDP do not count.
        tensor_parallel_degree: Number of ranks that share a layer's matrices and the sequence
            between them.
        context_parallel_degree: Number of ranks that share a window; they share the parameters,
            too, so they count in `shard_degree`.
        backward_steps: Number of last steps that the backward pass reaches; None for all.
        trainable: Parameters that have gradients and moments.
        fp32_visit_sum: Whether the contributions of R visits are summed in fp32.
        reshard_after_forward: `parallelism.fsdp_reshard_after_forward`.
        parameters_on_host: Whether shards are in the memory of a device's host.
        fused_norms: Whether RMSNorm is one kernel (CUDA) or composed of several (CPU).
        states: What the optimisers keep.
    """

    windows: int
    seq_len: int
    recurrent_steps: int
    checkpointing: Checkpointing = "none"
    compute_bytes: int = 2
    shard_degree: int = 1
    tensor_parallel_degree: int = 1
    context_parallel_degree: int = 1
    backward_steps: int | None = None
    trainable: Trainable = "all"
    fp32_visit_sum: bool = False
    reshard_after_forward: ReshardAfterForward = "default"
    parameters_on_host: bool = False
    fused_norms: bool = True
    states: OptimizerStates = field(default_factory=OptimizerStates)

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch on one rank; context parallelism splits a window."""
        return self.windows * self.seq_len / self.context_parallel_degree

    @property
    def steps_with_backward(self) -> int:
        """Recurrent steps that keep activations."""
        if self.trainable == "exit_gate":
            return 0
        return min(self.recurrent_steps, self.backward_steps or self.recurrent_steps)


def step_shape(
    *,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    activation_checkpoint: ActivationCheckpointing.Config | None,
    fp32_visit_sum: bool,
    world_size: int,
    device_type: DeviceType,
    compute_bytes: int,
    recurrent_steps: int,
    backward_steps: int | None,
    trainable: Trainable,
    states: OptimizerStates,
) -> StepShape:
    """Derive the work of one rank from a run's settings.

    Args:
        training: Batch, window and offloading.
        parallelism: Degrees; ranks left over shard the parameters.
        activation_checkpoint: Policy; None for none.
        fp32_visit_sum: `fsdp.fp32_visit_sum`.
        world_size: Number of ranks.
        device_type: What the ranks run on. On a CPU the device's memory is the host's.
        compute_bytes: Bytes of a parameter in the forward pass.
        recurrent_steps: The largest R of the run.
        backward_steps: Number of last steps that the backward pass reaches; None for all.
        trainable: Parameters that train.
        states: What the optimisers keep.
    """
    replicas = parallelism.data_parallel_replicate_degree
    tensor_parallel = parallelism.tensor_parallel_degree
    return StepShape(
        windows=training.local_batch_size,
        seq_len=training.seq_len,
        recurrent_steps=recurrent_steps,
        checkpointing=checkpointing_of(activation_checkpoint),
        compute_bytes=compute_bytes,
        shard_degree=max(1, world_size // (replicas * tensor_parallel)),
        tensor_parallel_degree=tensor_parallel,
        context_parallel_degree=parallelism.context_parallel_degree,
        backward_steps=backward_steps,
        trainable=trainable,
        fp32_visit_sum=fp32_visit_sum,
        reshard_after_forward=parallelism.fsdp_reshard_after_forward,
        parameters_on_host=training.enable_cpu_offload and device_type != "cpu",
        fused_norms=device_type == "cuda",
        states=states,
    )
