"""Never step on a non-finite gradient, never save a non-finite weight.

    loss, gradient norm ─► agree_on_step ─┬─► update
                                          └─► skip, count ─► too many in a row: stop (exit 3)

All ranks take the same decision, so no rank waits for a collective the others left.
"""

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_loop.errors import NonFiniteError, UserError

logger = logging.getLogger(__name__)


def agree_on_step(
    loss: Tensor, grad_norm: Tensor, *, stop: bool = False, group: dist.ProcessGroup | None = None
) -> tuple[bool, bool]:
    """Return what all ranks do with a step; collective.

    Args:
        loss: This rank's loss of the step, any shape.
        grad_norm: The gradient norm before clipping, any shape.
        stop: Whether this rank was asked to stop.
        group: The ranks that must agree; None for all of them.

    Returns:
        Whether loss and gradient norm are finite on every rank, and whether any rank was asked to
        stop.
    """
    finite = torch.isfinite(_local(loss)).all() & torch.isfinite(_local(grad_norm)).all()
    goes_on = torch.full_like(finite, not stop)
    flags = _all_reduce_minimum(torch.stack([finite, goes_on]).to(torch.int32), group)
    all_finite, all_go_on = flags.tolist()
    return bool(all_finite), not all_go_on


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


class SkipCounter:
    """Counts skipped updates and ends the run when too many follow one another.

    Args:
        max_skipped_steps: Skipped steps in a row that end the run, ≥ 1.

    Attributes:
        in_a_row: Skipped steps since the last update.
        total: Skipped steps of this process.
    """

    def __init__(self, max_skipped_steps: int) -> None:
        if max_skipped_steps < 1:
            raise UserError(f"max_skipped_steps={max_skipped_steps} is below 1; use at least 1")
        self.max_skipped_steps = max_skipped_steps
        self.in_a_row = 0
        self.total = 0

    def record(
        self,
        finite: bool,
        *,
        step: int,
        windows: range,
        loss: Tensor | float,
        grad_norm: Tensor | float,
    ) -> bool:
        """Count one step and return whether to update the weights.

        Args:
            finite: The agreed verdict of `agree_on_step`.
            step: The training step.
            windows: The global window numbers the step read, to find the data again.
            loss: This rank's loss, for the log; read only if the step is skipped.
            grad_norm: The gradient norm, likewise.

        Raises:
            NonFiniteError: At the `max_skipped_steps`-th skipped step in a row.
        """
        if finite:
            self.in_a_row = 0
            return True
        self.in_a_row += 1
        self.total += 1
        where = f"step {step} (windows {windows.start} to {windows.stop - 1})"
        logger.warning(
            "%s: loss %g or gradient norm %g is not finite on some rank; update skipped (%d of %d "
            "in a row)",
            where,
            float(loss),
            float(grad_norm),
            self.in_a_row,
            self.max_skipped_steps,
        )
        if self.in_a_row >= self.max_skipped_steps:
            raise NonFiniteError(
                f"stopped at {where}: {self.in_a_row} steps in a row had a non-finite loss or "
                "gradient; restart from the last checkpoint with a lower learning rate or fewer "
                "recurrent steps"
            )
        return False


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
    flags = torch.stack([_is_finite(_local(parameter.detach())) for _, parameter in named])
    flags = _all_reduce_minimum(flags.to(torch.int32), group)
    bad = (flags == 0).nonzero()
    return named[int(bad[0])][0] if len(bad) else None


def _is_finite(values: Tensor) -> Tensor:
    """Return a scalar bool on the tensor's device, without a temporary of the tensor's size."""
    if values.numel() == 0:  # an uneven shard may be empty
        return torch.ones((), dtype=torch.bool, device=values.device)
    smallest, largest = torch.aminmax(values)
    return torch.isfinite(smallest) & torch.isfinite(largest)


def _local(values: Tensor) -> Tensor:
    return values.to_local() if isinstance(values, DTensor) else values


def _all_reduce_minimum(flags: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=group)
    return flags
