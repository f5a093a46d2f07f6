"""The learned exit: one logit per token and recurrent step, always in fp32; and training it alone.

    λ_r = sigmoid(w·h_r + b)

Training the gate of a frozen model needs no special `forward`: autograd records nothing for frozen
parameters. The checkpoints then hold the whole model, but only the gate's optimiser state.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §3.2, Eq. 3.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.common.linear import Linear

Trainable: TypeAlias = Literal["all", "exit_gate"]
"""Parameters that train: all of them, or the exit gate's."""


class ExitGate(Linear):
    """Linear(D → 1) with bias, computed in fp32 whatever the dtype of the hidden state.

    In bf16 the cumulative exit probability rounds to 1 early, and the model exits before the last
    step.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Input width; one output and a bias."""

        out_features: int = 1
        bias: bool = True

    def forward(self, input: Tensor) -> Tensor:
        """Map hidden states (B, L, D) to exit logits (B, L), at least fp32."""
        wide = torch.promote_types(input.dtype, torch.float32)
        logit_BL1 = F.linear(input.to(wide), self.weight.to(wide), self.bias.to(wide))
        return logit_BL1.squeeze(-1).clone()  # FSDP cannot hook a view safely, and this is small


def freeze_all_but_the_exit_gate(model: nn.Module) -> None:
    """Freeze everything but the exit gate; call it before FSDP and the optimiser read the flags."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("exit_gate."))
