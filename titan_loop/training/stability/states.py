"""Norms of the state after each layer of each recurrent step, and of the gradient there.

    forward   h after layer l in step r ─► Σ h², number of elements ┐
    backward  ∂L/∂h at the same place   ─► Σ g², number of elements ┴─ added up on the device

Ranks that hold the same part of a state count it equally often in the sum and in the number of
elements, so the mean square is the same in every layout.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from titan_loop.models.initialisation import local_part
from titan_loop.training.callback import Callback, Phase, TrainingState

OUTSIDE = 0
"""Row of the layers outside the loop; recurrent step r has row r."""


class StateNorms(Callback):
    """Collects the norms of every `interval`-th training step, over all its micro-batches.

    After a measured step's backward pass, `sums` has Σ h², elements of h, Σ g² and elements of g
    over all ranks, (4, R + 1, N), for N layers. Visits that never happened are 0.
    """

    def __init__(
        self, layers: int, recurrent_steps: int, device: torch.device, interval: int = 1
    ) -> None:
        self._own = torch.zeros(4, recurrent_steps + 1, layers, device=device)
        self._interval, self._watching = interval, False
        self.sums = self._own

    def on_phase(self, trainer: TrainingState, phase: Phase) -> None:
        """Clear the sums before a measured step."""
        if phase == "reading data":
            self._watching = trainer.step % self._interval == 0
            if self._watching:
                self._own.zero_()

    def before_forward(self, trainer: TrainingState) -> None:
        """Start collecting; gradients follow in the backward pass."""
        if self._watching:
            trainer.model.observe = self._note

    def after_forward(self, trainer: TrainingState) -> None:
        """Stop collecting: recomputation in the backward pass is not a second visit."""
        trainer.model.observe = None

    def on_gradients(self, trainer: TrainingState) -> None:
        """Add the sums over all ranks, without waiting for the device."""
        if self._watching:
            self.sums = self._own.clone()
            if dist.is_initialized():
                dist.all_reduce(self.sums)

    def _note(self, hidden_BLD: Tensor, step: int | Tensor | None, layer: int) -> None:
        row = OUTSIDE if step is None else step
        assert isinstance(row, int), "training runs all rows of a batch in one step"
        if row >= self._own.shape[1]:
            return
        _add(self._own[:2, row, layer], hidden_BLD.detach())
        if hidden_BLD.requires_grad:
            place = self._own[2:, row, layer]
            hidden_BLD.register_hook(lambda gradient: _add(place, _whole(gradient.detach())))


def root_mean_square(sums: Tensor) -> Tensor:
    """Return the root mean square of states, (R + 1, N), NaN where there was no visit."""
    return (sums[0] / sums[1]).sqrt()


def gradient_norm(sums: Tensor, elements: int) -> Tensor:
    """Return the norm of the loss's gradient with respect to each state, (R + 1, N).

    `elements` is the size of a state: windows of the global batch x L x D. NaN where none arrived.
    """
    return (sums[2] / sums[3] * elements).sqrt()


def _add(place: Tensor, values: Tensor) -> None:
    values = local_part(values)
    norm = torch.linalg.vector_norm(values, dtype=torch.float32)
    place[0].add_(norm.square())
    place[1].add_(values.numel())


def _whole(gradient: Tensor) -> Tensor:
    """Sum a gradient over tensor-parallel ranks if each still holds only a partial sum."""
    if not isinstance(gradient, DTensor) or not any(p.is_partial() for p in gradient.placements):
        return gradient
    places = [Replicate() if place.is_partial() else place for place in gradient.placements]
    return gradient.redistribute(placements=places)
