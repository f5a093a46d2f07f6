"""Groups of parameters that an optimiser treats alike; the model assigns each parameter to one.

    matrix   at least two dimensions larger than 1                           decays
    vector   the rest: gains of norms, biases (of any shape), scales, a row  does not decay

Decay would pull a norm's gain, and with it the exit gate's input scale, towards 0.
"""

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Treatment of a parameter; parameters of equal treatment share an optimiser group."""

    decays: bool
    """Whether weight decay applies."""

    is_hidden_matrix: bool = False
    """Whether it maps hidden states to hidden states, so that Muon may orthogonalise its update."""

    rate_factor: float = 1.0
    """Factor on the scheduled learning rate."""

    width_ratio: float = 1.0
    """Width over the width that the rate was tuned at; every optimiser has its own rule for it."""


class LookUp:
    """Marks a module whose matrix is a table, such as a row per position; no embedding needs it."""


def default_group(
    name: str,
    parameter: Tensor,
    owner: nn.Module,
    width_ratio: float = 1.0,
) -> ParameterGroup:
    """Return the treatment that follows from a parameter's shape and from its module.

    Muon is not for tables: a batch changes few of their rows, and its update changes all alike.
    """
    is_matrix = sum(size > 1 for size in parameter.shape) > 1 and not name.endswith(".bias")
    is_table = isinstance(owner, (nn.Embedding, LookUp)) or name.startswith("lm_head.")
    is_hidden = is_matrix and parameter.ndim == 2 and not is_table
    grows = is_hidden or name.startswith("lm_head.")
    return ParameterGroup(
        decays=is_matrix,
        is_hidden_matrix=is_hidden,
        width_ratio=width_ratio if grows else 1.0,
    )
