"""How optimisers treat a model's parameters; the model says so, parameter by parameter.

    matrix   at least two dimensions larger than 1                           decays
    vector   the rest: gains of norms, biases (of any shape), scales, a row  does not decay

Decay would pull a norm's gain, and with it the exit gate's input scale, towards 0.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Treatment of a parameter; parameters with equal ones share an optimiser's group."""

    decays: bool
    """Whether weight decay applies."""

    is_hidden_matrix: bool = False
    """Whether it maps hidden states to hidden states, so that Muon may orthogonalise its update."""

    rate_factor: float = 1.0
    """Learning rate over the scheduled one."""


def default_group(name: str, parameter: Tensor) -> ParameterGroup:
    """Return the treatment that follows from the shape, for embedding and head from their names."""
    is_matrix = sum(size > 1 for size in parameter.shape) > 1 and not name.endswith(".bias")
    of_vocabulary = name.startswith(("tok_embeddings.", "lm_head."))
    return ParameterGroup(
        decays=is_matrix, is_hidden_matrix=is_matrix and parameter.ndim == 2 and not of_vocabulary
    )
