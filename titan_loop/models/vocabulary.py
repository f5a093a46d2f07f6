"""The slice of a vocabulary on one device, and its reductions over the other slices.

Shape suffixes: R recurrent steps, B batch, L sequence, D width, V vocabulary (of this slice), C
tokens of one chunk, K tokens kept.
"""

from collections.abc import Sequence

from torch import Tensor


class Vocabulary:
    """The rows of the head on this device, from token id `start`: here all V `rows`."""

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

    def gather_kept(self, id_CK: Tensor, value_CK: Tensor, kept: int) -> tuple[Tensor, Tensor]:
        """Return ids and values of all slices, one after the other; missing ones are -inf.

        Every slice contributes `kept` tokens, ascending by id, if it has as many rows.
        """
        return id_CK, value_CK

    def summand(self, part_BLD: Tensor, head_weight_VD: Tensor) -> Tensor:
        """Return this device's part of a sum over all slices, in the type of a state."""
        return part_BLD
