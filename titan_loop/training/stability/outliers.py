"""Bounds above which a step's numbers are outliers, from recent steps; computed on the device.

    median  m of the window, one for each number
    spread  s = max(floor, 1.4826 · median |x − m|), the standard deviation if x is normal
    outlier x > m + k·s, or x is NaN

An outlier in the window barely moves median and spread, unlike mean and standard deviation. Only
accepted values enter the window, and until it is full, the bound is infinite.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

MAD_TO_DEVIATION = 1.4826
"""1 / Φ⁻¹(3/4): standard deviation of a normal distribution over its median |x − m|."""


class RollingMedian:
    """The last `window` accepted values of several numbers; `threshold` is k, `floors` one each."""

    def __init__(
        self, window: int, threshold: float, floors: Sequence[float], device: torch.device
    ) -> None:
        self._threshold = threshold
        self._floors = torch.tensor([*floors], dtype=torch.float64, device=device)
        self._values = torch.zeros(window, len(floors), dtype=torch.float64, device=device)
        self._accepted = torch.zeros((), dtype=torch.int64, device=device)

    def bounds(self) -> Tensor:
        """Return each number's largest value that is not an outlier; infinity at first."""
        median = _median(self._values)
        spread = MAD_TO_DEVIATION * _median((self._values - median).abs())
        bound = median + self._threshold * torch.maximum(spread, self._floors)
        return torch.where(self._accepted >= len(self._values), bound, torch.inf)

    def take(self, values: Tensor, accept: Tensor) -> None:
        """Replace the oldest values in the window if `accept`, a scalar bool, and all are finite.

        A loss of 0, of a batch without labels, has no logarithm.
        """
        accept = accept & values.isfinite().all()
        place = (self._accepted % len(self._values)).reshape(1)
        current = self._values.index_select(0, place)
        taken = torch.where(accept, values.double(), current)  # `if` would wait for the device
        self._values.index_copy_(0, place, taken)
        self._accepted += accept

    def restart(self) -> None:
        """Forget every value."""
        self._accepted.zero_()

    def state_dict(self) -> dict[str, object]:
        """Return the window as JSON; waits for the device."""
        return {"accepted": int(self._accepted), "values": self._values.tolist()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore a saved window, or start an empty one if its shape differs."""
        values = torch.from_numpy(np.array(state["values"], dtype=np.float64))  # null becomes NaN
        if values.shape == self._values.shape and bool(values.isfinite().all()):
            self._values.copy_(values)
            self._accepted.fill_(state["accepted"])  # type: ignore[arg-type]
        else:
            self.restart()


def _median(values: Tensor) -> Tensor:
    # torch.median returns the lower of the two middle values, not their mean.
    ordered, count = values.sort(dim=0).values, len(values)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
