"""AdamW for the whole model; weight decay applies to matrices, embedding and head included.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, Table 1 (values); vectors without decay are our
choice, see `titan_loop/models/parameter_groups.py`.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Lt

from titan_loop.bounds import FINITE, Hint
from titan_loop.models.parameter_groups import ParameterGroup
from titan_loop.training.optimizers.settings import GroupSettings, OptimizerSettings


@dataclass(kw_only=True, slots=True)
class AdamWConfig(OptimizerSettings):
    """AdamW's settings."""

    title, factory, moments = "AdamW", torch.optim.AdamW, 2

    weight_decay: Annotated[float, Ge(0), FINITE] = 0.1
    """Decoupled weight decay of matrices."""

    beta1: Annotated[float, Ge(0), Lt(1), Hint("AdamW decays by it")] = 0.9
    """Decay of the first moment."""

    beta2: Annotated[float, Ge(0), Lt(1), Hint("AdamW decays by it")] = 0.95
    """Decay of the second moment."""

    eps: Annotated[float, Gt(0), FINITE, Hint("1e-8 is usual")] = 1e-8
    """Added to the denominator."""

    def settings(self, group: ParameterGroup) -> GroupSettings:
        return self._group(
            group.rate_factor / group.width_ratio,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay if group.decays else 0.0,
        )
