"""Model FLOPs of a looped decoder: they count computation, not weights.

The usual 6·N counts every weight once and so undercounts a loop by about R. Here every layer counts
R times and every readout counts once. The rest of the convention is torchtitan's: a multiply-add is
two operations, the backward pass costs twice the forward pass, attention is counted without causal
sparsity, recomputation and element-wise work do not count.
"""

from typing import NamedTuple


class Flops(NamedTuple):
    """Forward and backward FLOPs per token, by part; integers where R is one.

    Attributes:
        decoding: Decoding and re-encoding of states between two steps.
    """

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
