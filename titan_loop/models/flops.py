"""Model FLOPs of a looped decoder: every layer counts R times, every readout once.

The rest of the convention is torchtitan's: a multiply-add is two operations, the backward pass
costs twice the forward pass, attention counts without causal sparsity, recomputation and
element-wise work do not count.
"""

from typing import NamedTuple


class Flops(NamedTuple):
    """Forward and backward FLOPs per token, by part; `decoding` is between two steps."""

    matrices: float
    attention: float
    readouts: float
    gate: float
    decoding: float = 0

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(self)


class LayerVisits(NamedTuple):
    """Number of layers that a micro-batch visits; a layer counts as often as it is visited."""

    forward: float
    backward: float
