"""Model FLOPs of a looped decoder: they count computation, not weights.

The usual 6·N counts every weight once and so undercounts a loop by about R. Here every layer counts
R times and every readout counts once. The rest of the convention is torchtitan's: a multiply-add is
two operations, the backward pass costs twice the forward pass, attention is counted without causal
sparsity, recomputation and element-wise work do not count.
"""

from typing import NamedTuple

from titan_loop.models.exit_gate import Trainable


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


def training_flops_per_token(
    *,
    visits: LayerVisits,
    layer_parameters: int,
    query_width: int,
    dim: int,
    vocab_size: int,
    seq_len: int,
    recurrent_steps: float,
    gate: bool,
    trainable: Trainable = "all",
    backward_steps: float | None = None,
) -> Flops:
    """Return forward and backward FLOPs per token.

        (2·forward + 4·backward)·(layer_parameters + 2·query_width·L)
        + 6·readouts·D·V + 6·R·D [gate]

    The last state alone is read out without a gate, else all R are. Steps that the backward pass
    does not reach have 4 instead of 6 for their readout and gate, whose input needs no gradient. If
    only the gate trains: 2 instead of 6 for readouts, which run forward only, and 4 for the gate,
    whose input needs no gradient.

    Args:
        layer_parameters: Number of weights of one layer that take part in matrix products.
        recurrent_steps: R, or its mean.
        backward_steps: Number of last steps that the backward pass reaches, or its mean; None for
            all.
    """
    forward_only = recurrent_steps - min(recurrent_steps, backward_steps or recurrent_steps)
    layer_factor = 2 * visits.forward + 4 * visits.backward
    gate_factor = 6 * recurrent_steps - 2 * forward_only
    readout_factor = gate_factor if gate else 6
    if trainable == "exit_gate":
        gate_factor = 4 * recurrent_steps
        readout_factor = 2 * recurrent_steps if gate else 2
    return Flops(
        matrices=layer_factor * layer_parameters,
        attention=layer_factor * 2 * query_width * seq_len,
        readouts=readout_factor * dim * vocab_size,
        gate=gate_factor * dim if gate else 0,
    )
