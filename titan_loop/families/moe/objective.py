"""The losses of a mixture of experts: the objective's own, and penalties on its routing.

    L = L_exit + α balance + ζ z

balance and z are means over the visits of sparse layers and over tokens with a label; a token has
the balance of its window. Windows, micro-batches and ranks therefore add up to the same loss
however they are split. `titan_loop/families/moe/feed_forward.py` defines both.

Sources: DeepSeek-V3, arXiv 2412.19437, Eq. 17-20; Zoph et al. 2022, arXiv 2202.08906, Eq. 5.
Deviation: the mean over visits instead of the sum over layers, so that α and ζ mean the same at
every R.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge
from torch import Tensor
from torchtitan.config import CompileConfig

from titan_loop.bounds import FINITE
from titan_loop.models.output import LoopOutput
from titan_loop.models.readout import LMHead
from titan_loop.objectives.expected_loss import ExpectedExitLoss
from titan_loop.objectives.streamed_loss import LossBatch, token_mean


class MoELoss(ExpectedExitLoss):
    """Ouro's objective, or the last step's cross entropy, and the penalties on routing.

    Metrics beside the base class': `experts/balance`, 1 at equal loads, and `experts/router_z`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ExpectedExitLoss.Config):
        """α and ζ of the routers, and the options of the cross entropy."""

        balance_weight: Annotated[float, Ge(0), FINITE] = 0.0
        """α, the weight of unequal loads within a window; DeepSeek-V3 has 1e-4 beside the bias."""

        router_z_weight: Annotated[float, Ge(0), FINITE] = 0.0
        """ζ, the weight of large router logits; ST-MoE has 1e-3."""

        def aux(self) -> Mapping[str, str]:
            """Return balance and z, which are measured even if their weights are 0."""
            return {
                "balance": f"loss.balance_weight={self.balance_weight}",
                "router_z": f"loss.router_z_weight={self.router_z_weight}",
            }

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        super().__init__(config, compile_config=compile_config)
        self.balance_weight, self.router_z_weight = config.balance_weight, config.router_z_weight

    def compute(
        self, readout: LMHead, output: LoopOutput, batch: LossBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super().compute(readout, output, batch)
        labels_BL, valid_tokens = batch.labels_BL, batch.valid_tokens
        balance_BL = output.aux["balance"].unsqueeze(1).expand(labels_BL.shape)
        balance = token_mean(balance_BL, labels_BL, valid_tokens)
        router_z = token_mean(output.aux["router_z"], labels_BL, valid_tokens)
        loss = loss + self.balance_weight * balance + self.router_z_weight * router_z
        routing = {"experts/balance": balance.detach(), "experts/router_z": router_z.detach()}
        return loss, metrics | routing
