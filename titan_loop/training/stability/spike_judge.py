"""Judges a step's loss and gradient norm against recent steps, without leaving the device.

README.md has the rule. Gradient norms vary by factors, so their logarithm is judged.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_loop.training.stability.outliers import RollingMedian
from titan_loop.training.stability.states import OUTSIDE, gradient_norm, root_mean_square

LOSS_FLOOR_NATS = 0.02
"""Lower limit of the loss's spread: at threshold 8, a rise by 0.16 nats is not a spike."""

LOG_NORM_FLOOR = 0.05
"""Lower limit of the log gradient norm's spread: at threshold 8, a factor of 1.49 is not one."""

LOG_STATE_FLOOR = 0.02
"""Lower limit of the usual distance of a state's log norm from its mean."""

STANDS_OUT = 6.0
"""A state or gradient stands out if it is more usual distances than this above its mean."""

_BASELINE_STEPS = 16
_LEAST_STEPS = 4


class Evidence(NamedTuple):
    """The numbers that decide about a step or explain it, on the device.

    `values`, (2,), are loss and log gradient norm of the global batch, `bounds` their limits.
    `states`, (2, R + 1, N), are norms of states and gradients, `places` is `Baseline.compare`'s.
    """

    values: Tensor
    bounds: Tensor
    states: Tensor
    places: Tensor

    def calm(self) -> Tensor:
        """Return a scalar bool, False for a spike."""
        return (self.values <= self.bounds).all()  # False for NaN


class SpikeJudge:
    """Judges steps, and remembers the accepted ones; `shape` is (R + 1, N)."""

    def __init__(
        self, window: int, threshold: float, shape: tuple[int, int], device: torch.device
    ) -> None:
        self._recent = RollingMedian(window, threshold, (LOSS_FLOOR_NATS, LOG_NORM_FLOOR), device)
        self._baseline = Baseline(shape, device)
        self._regime: list[Any] | None = None

    def begin(self, regime: list[Any]) -> None:
        """Forget earlier steps if `step_plan.regime` changed: then the loss moves by plan."""
        if self._regime is not None and regime != self._regime:
            self._recent.restart()
            self._baseline.restart()
        self._regime = regime

    def look(self, loss: Tensor, grad_norm: Tensor, sums: Tensor, *, share: float) -> Evidence:
        """Compare a step with earlier ones; collective, without waiting for the device.

        `sums` are from `StateNorms`. `share` is 1 over the number of ranks with the same loss.
        """
        total = loss.detach().double().reshape(()) * share
        if dist.is_initialized():
            dist.all_reduce(total)
        # The norm of gradients that are offloaded to the host is on the host.
        norm = grad_norm.detach().to(total.device, non_blocking=True)
        values = torch.stack([total, norm.double().reshape(()).log()])
        states = torch.stack([root_mean_square(sums), gradient_norm(sums, 1)])
        visited = torch.stack([sums[1] > 0, sums[3] > 0])
        places = self._baseline.compare(states, visited)
        return Evidence(values, self._recent.bounds(), states, places)

    def take(self, evidence: Evidence, accept: Tensor) -> None:
        """Remember a step if `accept`, a scalar bool on the device, holds."""
        self._baseline.take(evidence.states, accept)
        self._recent.take(evidence.values, accept)

    def state_dict(self) -> dict[str, Any]:
        """Return the window as JSON; waits for the device."""
        return {"regime": self._regime, **self._recent.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the window; the baseline of states, which decides nothing, starts again."""
        self._regime = state["regime"]
        self._recent.load_state_dict(state)


class Baseline:
    """Running means of log norms, (R + 1, N), and of the distances from them.

    x = log norm;   m ← m + a·(x − m);   d ← d + a·(|x − m| − d);   a = max(1/16, 1/n)
    """

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self._seen, self._mean, self._distance = torch.zeros(3, 2, *shape, device=device)

    def compare(self, norms: Tensor, visited: Tensor) -> Tensor:
        """Return score (x − m) / d and ratio exp(x − m) of each norm, stacked: (2, 2, R + 1, N).

        `norms`, of states and gradients, and `visited` are (2, R + 1, N). The result is NaN before
        enough steps, and infinite where a visited norm is not finite.
        """
        distance = norms.log() - self._mean
        score = distance / self._distance.clamp(min=LOG_STATE_FLOOR)
        found = torch.stack([score, distance.exp()])
        found = torch.where(self._seen >= _LEAST_STEPS, found, torch.nan)
        return torch.where(visited & ~norms.isfinite(), torch.inf, found)

    def take(self, norms: Tensor, accept: Tensor) -> None:
        """Take in the norms of an accepted step."""
        logs = norms.log()
        fits = logs.isfinite() & accept
        self._seen += fits
        rate = (1 / self._seen).clamp(min=1 / _BASELINE_STEPS)
        distance = logs - self._mean
        spread = self._distance + rate * (distance.abs() - self._distance)
        self._distance = torch.where(fits & (self._seen > 1), spread, self._distance)
        self._mean = torch.where(fits, self._mean + rate * distance, self._mean)

    def restart(self) -> None:
        """Forget everything."""
        for values in (self._seen, self._mean, self._distance):
            values.zero_()


class Place(NamedTuple):
    """The place where a spike began; step 0 is outside the loop, `ratio` is to the usual norm."""

    kind: str
    step: int
    layer: int
    ratio: float

    def __str__(self) -> str:
        where = "outside the loop" if self.step == OUTSIDE else f"in recurrent step {self.step}"
        after = "after" if self.kind == "state" else "at"
        return f"{self.kind} {after} layer {self.layer} {where}, {self.ratio:.3g} times the usual"


def where_it_began(places: Tensor, looped: range) -> Place | None:
    """Return the first visit whose state stands out, else whose gradient does; None if none does.

    States are in the order of the forward pass, gradients in the order of the backward pass.
    """
    (state_score, gradient_score), (state_ratio, gradient_ratio) = places.tolist()
    rows, layers = len(state_score), len(state_score[0])
    visits = [
        *((OUTSIDE, layer) for layer in range(looped.start)),
        *((row, layer) for row in range(1, rows) for layer in looped),
        *((OUTSIDE, layer) for layer in range(looped.stop, layers)),
    ]
    for step, layer in visits:
        if state_score[step][layer] > STANDS_OUT:
            return Place("state", step, layer, state_ratio[step][layer])
    for step, layer in reversed(visits):
        if gradient_score[step][layer] > STANDS_OUT:
            return Place("gradient", step, layer, gradient_ratio[step][layer])
    return None
