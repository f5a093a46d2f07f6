"""Judges a step's loss and log gradient norm against recent steps, without leaving the device.

    median  m of the window, one for each number
    spread  s = max(floor, 1.4826 · median |x − m|), the standard deviation if x is normal
    spike   x > m + k·s, or x is NaN

A spike in the window would barely move median and spread, unlike mean and standard deviation. Only
accepted steps enter the window, and until it is full, nothing is a spike. Gradient norms vary by
factors, so their logarithm is judged.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

MAD_TO_DEVIATION = 1.4826
"""1 / Φ⁻¹(3/4): standard deviation of a normal distribution over its median |x − m|."""

FLOORS = (0.02, 0.05)
"""Lower limits of the spreads. At threshold 8, a loss higher by 0.16 nats or a gradient norm higher
by a factor of 1.49 is not a spike."""


class Evidence(NamedTuple):
    """Loss and log gradient norm of the global batch, and their bounds, (2,), on the device."""

    values: Tensor
    bounds: Tensor

    def calm(self) -> Tensor:
        """Return a scalar bool, False for a spike."""
        return (self.values <= self.bounds).all()  # False for NaN


class SpikeJudge:
    """Judges steps, and remembers the last `window` accepted ones; `threshold` is k."""

    def __init__(self, window: int, threshold: float, device: torch.device) -> None:
        self._threshold = threshold
        self._floors = torch.tensor(FLOORS, dtype=torch.float64, device=device)
        self._values = torch.zeros(window, len(FLOORS), dtype=torch.float64, device=device)
        self._accepted = torch.zeros((), dtype=torch.int64, device=device)
        self._regime: list[Any] | None = None

    def begin(self, regime: list[Any]) -> None:
        """Forget earlier steps if `step_plan.regime` changed: then the loss moves by plan."""
        if self._regime is not None and regime != self._regime:
            self._accepted.zero_()
        self._regime = regime

    def look(self, loss: Tensor, grad_norm: Tensor, *, share: float) -> Evidence:
        """Compare a step with earlier ones; collective, without waiting for the device.

        `share` is 1 over the number of ranks with the same loss.
        """
        total = loss.detach().double().reshape(()) * share
        if dist.is_initialized():
            dist.all_reduce(total)
        # The norm of gradients that are offloaded to the host is on the host.
        norm = grad_norm.detach().to(total.device, non_blocking=True)
        values = torch.stack([total, norm.double().reshape(()).log()])
        return Evidence(values, self._bounds())

    def take(self, evidence: Evidence, accept: Tensor) -> None:
        """Remember a step in place of the oldest if `accept`, a scalar bool on the device, holds.

        A loss of 0, of a batch without labels, has no logarithm, and is left out.
        """
        accept = accept & evidence.values.isfinite().all()
        place = (self._accepted % len(self._values)).reshape(1)
        current = self._values.index_select(0, place)
        taken = torch.where(accept, evidence.values, current)  # `if` would wait for the device
        self._values.index_copy_(0, place, taken)
        self._accepted += accept

    def state_dict(self) -> dict[str, Any]:
        """Return the window as JSON; waits for the device."""
        accepted, values = int(self._accepted), self._values.tolist()
        return {"regime": self._regime, "accepted": accepted, "values": values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved window, or start an empty one if its length differs."""
        self._regime = state["regime"]
        values = torch.from_numpy(np.array(state["values"], dtype=np.float64))  # null becomes NaN
        fits = values.shape == self._values.shape and bool(values.isfinite().all())
        self._accepted.fill_(state["accepted"] if fits else 0)
        if fits:
            self._values.copy_(values)

    def _bounds(self) -> Tensor:
        median = _median(self._values)
        spread = MAD_TO_DEVIATION * _median((self._values - median).abs())
        bound = median + self._threshold * torch.maximum(spread, self._floors)
        return torch.where(self._accepted >= len(self._values), bound, torch.inf)


def _median(values: Tensor) -> Tensor:
    # torch.median returns the lower of the two middle values, not their mean.
    ordered, count = values.sort(dim=0).values, len(values)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
