"""Model FLOPs of a looped decoder: what is computed, not how many weights there are.

The usual 6·N counts every weight once and so undercounts a loop by about R. Here every layer counts
R times and every readout counts once. The rest of the convention is torchtitan's: a multiply-add is
two operations, the backward pass costs twice the forward pass, attention is counted without causal
sparsity, recomputation and element-wise work do not count.
"""

from titan_loop.models.trainable import Trainable


def training_flops_per_token(
    *,
    layer_parameters: int,
    n_layers: int,
    n_heads: int,
    head_dim: int,
    dim: int,
    vocab_size: int,
    seq_len: int,
    recurrent_steps: int,
    readouts: int,
    gate: bool,
    trainable: Trainable = "all",
    backward_steps: int | None = None,
) -> int:
    """Forward and backward FLOPs per token.

        6·R·n_layers·(layer_parameters + 2·n_heads·head_dim·L) + 6·readouts·D·V + 6·R·D [gate]

    Steps that the backward pass does not reach run forward only: 2 instead of 6 for their layers,
    and 4 for their readout and gate, whose input needs no gradient. If only the gate trains: 2
    instead of 6 for layers and readouts, which run forward only, and 4 for the gate, likewise.

    Args:
        layer_parameters: Weights of one layer that take part in matrix products.
        n_layers: Unique layers.
        n_heads: Query heads.
        head_dim: H.
        dim: D.
        vocab_size: V.
        seq_len: L, the window.
        recurrent_steps: R.
        readouts: How many steps' states are mapped to logits.
        gate: Whether there is an exit gate.
        trainable: What the backward pass reaches.
        backward_steps: The last steps that it reaches; None for all.
    """
    attention = 2 * n_heads * head_dim * seq_len
    layers = recurrent_steps * n_layers * (layer_parameters + attention)
    language_model = layers + readouts * dim * vocab_size
    exit_gate = recurrent_steps * dim if gate else 0
    if trainable == "exit_gate":
        return 2 * language_model + 4 * exit_gate
    left_out = recurrent_steps - min(recurrent_steps, backward_steps or recurrent_steps)
    # Without a gate the last state alone is read out.
    tables = min(left_out, readouts - 1) * dim * vocab_size + (left_out * dim if gate else 0)
    forward_only = left_out * n_layers * (layer_parameters + attention)
    return 6 * (language_model + exit_gate) - 4 * forward_only - 2 * tables
