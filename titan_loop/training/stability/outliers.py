"""Outliers among a few numbers, one set per step, against recent ones; all on the device.

    median  m of the window, one for each number
    spread  s = 1.4826 · median |x − m|, the standard deviation if x were normal, at least a floor
    outlier x > m + k·s, or x not finite

Unlike a mean and a deviation, median and spread ignore outliers in the window. Only accepted values
enter the window, and nothing is judged before it is full.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

MAD_TO_DEVIATION = 1.4826
"""1 / Φ⁻¹(3/4): the median distance from the median of a normal distribution, in deviations."""


class RollingMedian:
    """The last `window` accepted values of several numbers; `floors` are their smallest spreads."""

    def __init__(
        self, window: int, threshold: float, floors: Sequence[float], device: torch.device
    ) -> None:
        self._threshold = threshold
        self._floors = torch.tensor([*floors], dtype=torch.float64, device=device)
        self._values = torch.zeros(window, len(floors), dtype=torch.float64, device=device)
        self._accepted = torch.zeros((), dtype=torch.int64, device=device)

    def bounds(self) -> Tensor:
        """Return the largest value of each number that is not an outlier; infinity at first."""
        median = _median(self._values)
        spread = MAD_TO_DEVIATION * _median((self._values - median).abs())
        bound = median + self._threshold * torch.maximum(spread, self._floors)
        return torch.where(self._accepted >= len(self._values), bound, torch.inf)

    def take(self, values: Tensor, accept: Tensor) -> None:
        """Replace the oldest values of the window if `accept`, a scalar bool, holds."""
        place = (self._accepted % len(self._values)).reshape(1)
        current = self._values.index_select(0, place)
        taken = torch.where(accept, values.double(), current)
        self._values.index_copy_(0, place, taken)
        self._accepted += accept

    def restart(self) -> None:
        """Forget every value."""
        self._accepted.zero_()

    def state_dict(self) -> dict[str, object]:
        """Return the window as JSON; waits for the device."""
        return {"accepted": int(self._accepted), "values": self._values.tolist()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore a saved window; one of another length is dropped."""
        values = torch.tensor(state["values"], dtype=torch.float64)
        if values.shape == self._values.shape:
            self._values.copy_(values)
            self._accepted.fill_(state["accepted"])  # type: ignore[arg-type]
        else:
            self.restart()


def _median(values: Tensor) -> Tensor:
    # torch's own median is the lower of the two in the middle.
    ordered, count = values.sort(dim=0).values, len(values)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
