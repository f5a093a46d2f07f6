"""When a training step can be captured in a CUDA graph: `training.disable_cuda_graphs=False`.

The forward and backward pass of a micro-batch are run once, captured once, and replayed from then
on: the host launches one graph instead of every kernel. A replay repeats what was captured on new
tokens, so whatever else the host decides must be the same every time. Off by default; never run on
a GPU by this project yet: the conditions, and what the trainer copies out of a graph's tensors, are
tested on CPU.
"""

from titan_loop.distributed.loop_fsdp import FSDPConfig
from titan_loop.errors import UserError
from titan_loop.training.recurrence import (
    RecurrenceConfig,
    fewest_recurrent_steps,
    most_recurrent_steps,
)
from titan_loop.training.schedule import Schedule

_FLAG = "training.disable_cuda_graphs=False"


def check_cuda_graphs(
    *,
    recurrence: RecurrenceConfig,
    entropy_weight: Schedule,
    fsdp: FSDPConfig,
    moves_to_host: bool,
) -> None:
    """Refuse to capture what a replay would repeat wrongly.

    Args:
        recurrence: R must be the same in every batch.
        entropy_weight: β, a number in the captured kernels; constant, too.
        fsdp: Layers must be gathered in every micro-batch, which is captured alone.
        moves_to_host: Whether activations or parameters live on the host.

    Raises:
        UserError: One line naming the field that varies and the fix.
    """
    fewest, most = fewest_recurrent_steps(recurrence), most_recurrent_steps(recurrence)
    if fewest != most:
        raise UserError(
            f"{_FLAG} replays one number of recurrent steps, and recurrence.steps="
            f"{str(recurrence.steps)!r} gives {fewest} to {most}; leave it True, or fix R"
        )
    if entropy_weight.smallest != entropy_weight.largest:
        raise UserError(
            f"{_FLAG} replays one entropy weight, and entropy_weight={str(entropy_weight)!r} "
            "changes; leave it True, or make that constant"
        )
    if fsdp.policy == "per_step":
        raise UserError(
            f"{_FLAG} would replay a micro-batch without the gathers that fsdp.policy=per_step "
            "saves; use fsdp.policy=per_visit"
        )
    if moves_to_host:
        raise UserError(
            f"{_FLAG} does not work with activation-checkpoint:full-offload or "
            "training.enable_cpu_offload, which wait for copies to the host; leave it True"
        )
