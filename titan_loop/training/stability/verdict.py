"""Never step on a non-finite gradient, never save a non-finite weight.

    loss, gradient norm ─► agree_on_step ─► verdict ─┬─► update, or none, decided on the device
                                                     └─► read a step later: counted; too many
                                                         skipped in a row: stop (exit 3)

All ranks take the same decision, so no rank waits for a collective the others left. The host reads
the verdict on a step when the next step's kernels are queued, so the device never waits for it.
"""

import logging
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.optimizer import OptimizersContainer

from titan_loop.errors import NonFiniteError, UserError
from titan_loop.models.initialisation import local_part
from titan_loop.ranks import warn_together
from titan_loop.storage.transient import retries

logger = logging.getLogger(__name__)


class Evidence(NamedTuple):
    """What a step was judged by; stays on the device until somebody asks.

    Attributes:
        values: Loss of the global batch, log gradient norm.
        bounds: What each may be at most.
        places: (2, 2, R + 1, N) scores and ratios of norms, see `spikes.Baseline.compare`.
    """

    values: Tensor
    bounds: Tensor
    places: Tensor


class StepVerdict:
    """What all ranks agreed on about one step; on the device until it is read.

    Args:
        flags: (3,) or (4,) int32, the same on all ranks: 1 if the step was finite, 1 if training
            goes on, less the largest number of reads that a rank had to repeat, 1 if the step was
            no spike.

    Attributes:
        skip: fp32 scalar on the device: 1 if the update must be skipped, else 0.
        io_retries: Reads that the rank with the most had to repeat; known once this was read.
        evidence: What it is based on, where spikes are looked for.
    """

    evidence: Evidence | None = None

    def __init__(self, flags: Tensor) -> None:
        self.skip = (1 - (flags[0] if len(flags) == 3 else flags[0] * flags[3])).float()
        self._flags = flags.to("cpu", non_blocking=True)
        self._copied = None
        self.io_retries = 0
        if flags.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> tuple[bool, bool]:
        """Return whether the step updates the weights and whether any rank was asked to stop.

        Waits until the device has come to the end of the step's backward pass.
        """
        if self._copied is not None:
            self._copied.synchronize()
        finite, goes_on, read_again, *calm = self._flags.tolist()
        self.io_retries = -read_again
        return bool(finite) and all(calm), not goes_on


def agree_on_step(
    loss: Tensor,
    grad_norm: Tensor,
    *,
    stop: bool = False,
    calm: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> StepVerdict:
    """Return what all ranks do with a step; collective, and no wait for the device.

    Args:
        loss: This rank's loss of the step, any shape.
        grad_norm: The gradient norm before clipping, any shape.
        stop: Whether this rank was asked to stop.
        calm: Whether this rank sees no spike, a scalar bool; None if nobody looks for one.
        group: The ranks that must agree; None for all of them.

    Returns:
        Finite if loss and gradient norm are finite on every rank, calm if every rank is, stop if
        any rank was asked to.
    """
    finite = torch.isfinite(local_part(loss)).all() & torch.isfinite(local_part(grad_norm)).all()
    goes_on = torch.full_like(finite, not stop)
    read_again = torch.full_like(finite, -retries(), dtype=torch.int32)
    judged = [] if calm is None else [calm.to(torch.int32)]
    flags = torch.stack([finite.to(torch.int32), goes_on.to(torch.int32), read_again, *judged])
    return StepVerdict(_all_reduce_minimum(flags, group))


def update_unless_skipped(optimizers: OptimizersContainer, verdict: StepVerdict) -> None:
    """Update the weights unless the verdict is to skip the step.

    torch's fused optimisers read the verdict on the device, as they do under a gradient scaler, and
    leave weights, moments and their step count alone. Any other one waits for it; so do weights
    that are offloaded to the host, where the optimiser would read a copy still on its way.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    if all(group.get("fused") for group in groups) and devices <= {verdict.skip.device.type}:
        for optimizer in optimizers:
            optimizer.found_inf = verdict.skip  # type: ignore[attr-defined]
        optimizers.step()
    elif verdict.read()[0]:
        optimizers.step()


def agree_to_stop(
    stop: bool, device: torch.device | None = None, group: dist.ProcessGroup | None = None
) -> bool:
    """Return whether any rank was asked to stop; collective.

    Args:
        stop: Whether this rank was.
        device: Where the ranks' collectives run.
        group: The ranks that must agree; None for all of them.
    """
    goes_on = torch.tensor([not stop], dtype=torch.int32, device=device)
    return not bool(_all_reduce_minimum(goes_on, group))


class JudgedStep(NamedTuple):
    """A step whose verdict is to be read; see `SkippedSteps.add`."""

    verdict: StepVerdict
    step: int
    windows: range
    loss: Tensor
    grad_norm: Tensor


class SkippedSteps:
    """Reads verdicts, counts skipped updates and ends the run when too many follow one another.

    Args:
        max_skipped_steps: Skipped steps in a row that end the run, ≥ 1.

    Attributes:
        in_a_row: Skipped steps since the last update, of those read.
        total: Skipped steps of this process, of those read.
    """

    def __init__(self, max_skipped_steps: int) -> None:
        if max_skipped_steps < 1:
            raise UserError(f"max_skipped_steps={max_skipped_steps} is below 1; use at least 1")
        self.max_skipped_steps = max_skipped_steps
        self.in_a_row = 0
        self.total = 0
        self._unread: deque[JudgedStep] = deque()

    def add(
        self, verdict: StepVerdict, *, step: int, windows: range, loss: Tensor, grad_norm: Tensor
    ) -> None:
        """Note a step whose verdict is to be read.

        Args:
            verdict: The step's verdict, from `agree_on_step`.
            step: Number of the training step.
            windows: The global window numbers the step read, to find the data again.
            loss: This rank's loss, for the log; read only if the step is skipped.
            grad_norm: The gradient norm, read like the loss.
        """
        self._unread.append(JudgedStep(verdict, step, windows, loss, grad_norm))

    def read(self, *, newest: bool) -> bool:
        """Read the verdicts on all steps but the newest, and on that one, too, if asked to.

        Returns:
            Whether any rank was asked to stop; then every verdict was read.

        Raises:
            NonFiniteError: At the `max_skipped_steps`-th skipped step in a row.
        """
        stop = False
        while len(self._unread) > (0 if newest or stop else 1):
            judged = self._unread.popleft()
            updated, asked = judged.verdict.read()
            stop = stop or asked
            if updated:
                self._accept()
            else:
                self._count(judged)
        return stop

    def _accept(self) -> None:
        self.in_a_row = 0

    def _count(self, judged: JudgedStep) -> None:
        self.in_a_row += 1
        self.total += 1
        windows = judged.windows
        where = f"step {judged.step} (windows {windows.start} to {windows.stop - 1})"
        warn_together(
            logger,
            "%s: loss %g or gradient norm %g is not finite on some rank; update skipped (%d of %d "
            "in a row)",
            where,
            float(judged.loss),
            float(judged.grad_norm),
            self.in_a_row,
            self.max_skipped_steps,
        )
        if self.in_a_row >= self.max_skipped_steps:
            raise NonFiniteError(
                f"stopped at {where}: {self.in_a_row} steps in a row had a non-finite loss or "
                "gradient; restart from the last checkpoint with a lower learning rate or fewer "
                "recurrent steps"
            )


def first_non_finite_parameter(
    model_parts: Sequence[nn.Module], group: dist.ProcessGroup | None = None
) -> str | None:
    """Return the name of the first parameter with a NaN or infinity on any rank; collective.

    Every rank holds the same parameters in the same order (a shard of each), so all ranks return
    the same name. Call it before saving.

    Args:
        model_parts: The model, as torchtitan's trainer keeps it.
        group: The ranks that must agree; None for all of them.

    Returns:
        The parameter's qualified name, or None if all are finite.
    """
    named = [item for part in model_parts for item in part.named_parameters()]
    if not named:
        return None
    flags = torch.stack([_is_finite(local_part(parameter.detach())) for _, parameter in named])
    flags = _all_reduce_minimum(flags.to(torch.int32), group)
    bad = (flags == 0).nonzero()
    return named[int(bad[0])][0] if len(bad) else None


def _is_finite(values: Tensor) -> Tensor:
    """Return a scalar bool on the tensor's device, without a temporary of the tensor's size."""
    if values.numel() == 0:  # an uneven shard may be empty
        return torch.ones((), dtype=torch.bool, device=values.device)
    smallest, largest = torch.aminmax(values)
    return torch.isfinite(smallest) & torch.isfinite(largest)


def _all_reduce_minimum(flags: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=group)
    return flags
