"""The output of a looped decoder, which an objective reads."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

Collect: TypeAlias = Literal["all", "last"]
"""Steps whose states a forward pass returns."""


class LoopOutput(NamedTuple):
    """Hidden states and exit logits of the recurrent steps that an objective asked for.

    A named tuple is a pytree, so FSDP's hooks find every tensor in it. The steps are not stacked,
    which would copy R·B·L·D values and keep them alive a second time.

    Attributes:
        hidden_RBLD: R tensors (B, L, D) from `LoopDecoder.read`, whole on tensor-parallel ranks.
        exit_logit_RBL: R tensors (B, L), fp32; empty for a model without an exit gate.
        first_step: Recurrent step of the first state; R where only the last one was collected.
        aux: Further tensors for the family's objective by name, such as the cost of halting.
    """

    hidden_RBLD: tuple[Tensor, ...]
    exit_logit_RBL: tuple[Tensor, ...]
    first_step: int = 1
    aux: Mapping[str, Tensor] = {}
