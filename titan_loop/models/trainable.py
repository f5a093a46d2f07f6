"""Which parameters train: all of them, or only the exit gate of a frozen language model.

A frozen stack needs no switch of its own in `forward`: without a parameter that requires a gradient
autograd records nothing, so no activation outlives its layer, however often that is visited.

Checkpoints of a gate stage hold the whole model, and of the optimiser the gate's entries alone. So
a stage that trains something else than its parent starts with moments at zero.
"""

from typing import Literal, TypeAlias

from torch import nn

Trainable: TypeAlias = Literal["all", "exit_gate"]

EXIT_GATE_PATTERN = r"^exit_gate\."
"""Regular expression for the names of the gate's parameters."""


def freeze_all_but_the_exit_gate(model: nn.Module) -> None:
    """Leave gradients to the exit gate only; before FSDP and the optimiser read the flags."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("exit_gate."))
