"""Never step on a non-finite gradient, never save a non-finite weight.

    loss, gradient norm ─► agree_on_step ─► verdict ─┬─► update, or none, decided on the device
                                                     └─► read a step later: `Callback.on_verdict`

All ranks decide alike, so none waits in a collective that others left. The host reads a verdict
only when the next step's kernels are queued, so the device need not wait for the host.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.optimizer import OptimizersContainer

from titan_loop.models.initialisation import local_part


class StepVerdict:
    """Common decision of all ranks about one step; on the device until it is read.

    `flags`, (2,) int32 and the same on all ranks, are: 1 to update the weights, and 1 to go on with
    training. `skip` is an fp32 scalar: 1 if the update must be skipped, else 0.
    """

    def __init__(self, flags: Tensor) -> None:
        self.skip = (1 - flags[0]).float()
        self._flags = flags.to("cpu", non_blocking=True)
        self._copied = None
        if flags.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> tuple[bool, bool]:
        """Return whether to update and whether to stop; waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        updates, goes_on = self._flags.tolist()
        return bool(updates), not goes_on


class TrainedStep(NamedTuple):
    """Results of a training step, on the device; loss and metrics are this rank's shares."""

    step: int
    windows: range
    loss: Tensor
    metrics: dict[str, Tensor]
    grad_norm: Tensor
    verdict: StepVerdict


class UnreadSteps:
    """Training steps whose verdict the host has not read yet.

    Each step that is read is passed to `tell`, in order, with whether it updated the weights.
    """

    def __init__(self, tell: Callable[[TrainedStep, bool], None]) -> None:
        self._tell = tell
        self._steps: deque[TrainedStep] = deque()

    def add(self, trained: TrainedStep) -> None:
        """Add a step just done."""
        self._steps.append(trained)

    def read(self, *, newest: bool) -> bool:
        """Read the verdicts on all steps, or all but the newest; return whether to stop.

        If any rank was asked to stop, every verdict is read.
        """
        stop = False
        while len(self._steps) > (0 if newest or stop else 1):
            trained = self._steps.popleft()
            updated, asked = trained.verdict.read()
            stop = stop or asked
            self._tell(trained, updated)
        return stop


def agree_on_step(
    loss: Tensor, grad_norm: Tensor, *, stop: bool = False, calm: Tensor | None = None
) -> StepVerdict:
    """Return the common decision of all ranks about a step; collective, without a device wait.

    The weights are updated if loss and gradient norm are finite and `calm`, a scalar bool or None,
    holds on every rank. Training stops if any rank was asked to `stop`.
    """
    updates = torch.isfinite(local_part(loss)).all() & torch.isfinite(local_part(grad_norm)).all()
    if calm is not None:
        updates = updates & calm
    goes_on = torch.full_like(updates, not stop)
    flags = torch.stack([updates.to(torch.int32), goes_on.to(torch.int32)])
    return StepVerdict(_all_reduce_minimum(flags))


def update_unless_skipped(optimizers: OptimizersContainer, verdict: StepVerdict) -> None:
    """Update the weights unless the verdict is to skip the step.

    torch's fused optimisers read the verdict on the device, as under a gradient scaler. The host
    waits before others, and before offloaded weights: a CPU optimiser could read it too early.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    if all(group.get("fused") for group in groups) and devices <= {verdict.skip.device.type}:
        for optimizer in optimizers:
            optimizer.found_inf = verdict.skip  # type: ignore[attr-defined]
        optimizers.step()
    elif verdict.read()[0]:
        optimizers.step()


def agree_to_stop(stop: bool, device: torch.device | None = None) -> bool:
    """Return whether any rank was asked to stop; collective."""
    goes_on = torch.tensor([not stop], dtype=torch.int32, device=device)
    return not bool(_all_reduce_minimum(goes_on))


def first_non_finite_parameter(model_parts: Sequence[nn.Module]) -> str | None:
    """Return the name of the first parameter with a NaN or infinity on any rank; collective."""
    named = [item for part in model_parts for item in part.named_parameters()]
    if not named:
        return None
    flags = torch.stack([_is_finite(local_part(parameter.detach())) for _, parameter in named])
    flags = _all_reduce_minimum(flags.to(torch.int32))
    bad = (flags == 0).nonzero()
    return named[int(bad[0])][0] if len(bad) else None


def _is_finite(values: Tensor) -> Tensor:
    if values.numel() == 0:  # an uneven shard may be empty
        return torch.ones((), dtype=torch.bool, device=values.device)
    smallest, largest = torch.aminmax(values)  # no temporary of the tensor's size
    return torch.isfinite(smallest) & torch.isfinite(largest)


def _all_reduce_minimum(flags: Tensor) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    return flags
