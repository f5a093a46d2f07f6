"""Ouro's first attempt at rewards: full-depth answers, an exit found afterwards.

    answers after R steps ─► e, the first step whose CDF reaches q ─► Σ_{r ≤ e} log π_r for log π

The gate picks the exit when the update is made, so a token that step R wrote is taught at earlier
steps; later steps and their losses are discarded. Answers are read once, so the ratio is 1 and the
gradient is A Σ_{r ≤ e} ∇log π_r, as for the cumulative loss.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §4.5, "Off-policy rollouts". The text gives no
equation, threshold or weight of the steps: the sum and q = 0.5 are choices of ours.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from titan_loop.objectives.exit_distribution import reaches_threshold
from titan_loop.rl.reward_loss import RewardLoss


class CumulativeLoss(RewardLoss):
    """The objective; answers must be written at full depth."""

    @dataclass(kw_only=True, slots=True)
    class Config(RewardLoss.Config):
        """As `RewardLoss` with a trajectory, whose ω is 1 up to the exit and 0 after it."""

        trajectory: Literal["off", "uniform", "progressive", "pmf"] = field(
            default="pmf", init=False
        )

        threshold: Annotated[float, Ge(0), Le(1)] = 0.5
        """q of the exit found afterwards."""

    config: Config

    def _omega(self, log_prob_RBL: Tensor, gate_RBL: Tensor | None) -> Tensor:
        assert gate_RBL is not None
        return steps_up_to_exit(gate_RBL.detach(), self.config.threshold)


def steps_up_to_exit(gate_RBL: Tensor, threshold: float) -> Tensor:
    """Return 1 up to the first step whose CDF reaches the threshold, 0 after it; (R, B, L)."""
    left_RBL = torch.nn.functional.logsigmoid(-gate_RBL.float()).cumsum(dim=0)
    gone_RBL = reaches_threshold(left_RBL, threshold)
    ran_RBL = torch.ones_like(left_RBL)
    ran_RBL[1:] = (~gone_RBL[:-1]).to(ran_RBL.dtype)  # an exit never comes back: CDF only grows
    return ran_RBL
