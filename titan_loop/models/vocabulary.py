"""The slice of a vocabulary on one device, and its reductions over the other slices.

Shape suffixes: R recurrent steps, B batch, L sequence, D width, V vocabulary (of this slice).
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor


class Vocabulary:
    """This device's rows of the head, from token id `start`, of `rows` in all; here it has all."""

    group: dist.ProcessGroup | None = None

    def __init__(self, rows: int, start: int = 0) -> None:
        self.rows = rows
        self.start = start

    def local(
        self, head_weight_VD: Tensor, hidden_RBLD: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return head weight and states as plain tensors of this device."""
        return head_weight_VD, tuple(hidden_RBLD)

    def all_reduce_max(self, value: Tensor) -> None:
        """Take the largest value over all slices, in place."""

    def all_reduce_sum(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the sums over all slices of tensors of one shape."""
        return values
