"""The loss of models whose layers loop: cross entropy, and a price for extra iterations.

    L = CE + λ ñ,   ñ = (n̄ − 1) / (N_max − 1) in [0, 1],   n̄ = 1/N Σ_ℓ E[n_ℓ]

Source: Frey et al. 2026, "Adaptive loops and memory in transformers", Eq. 11–12; λ = 0 in most of
its runs. Deviation: E[n_ℓ] is the mean over tokens with a label, like the cross entropy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor
from torchtitan.config import CompileConfig

from titan_loop.bounds import FINITE, Hint
from titan_loop.models.output import LoopOutput
from titan_loop.models.readout import LMHead
from titan_loop.objectives.expected_loss import ExpectedExitLoss
from titan_loop.objectives.streamed_loss import LossBatch, token_mean


class PonderCostLoss(ExpectedExitLoss):
    """The last state's cross entropy and the ponder cost.

    Metrics beside `ce/step_1`, for the entries that `LoopOutput.aux` has:

    | key | meaning |
    |---|---|
    | `loops/cost` | ñ |
    | `loops/layer_1` … | E[n_ℓ], iterations of layer ℓ |
    | `loop_scale/layer_1_1` … | softplus(α_t) of layer ℓ and iteration t |
    | `memory_gate/local_1` …, `memory_gate/global_1` … | mean gate of layer ℓ |
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ExpectedExitLoss.Config):
        """λ, and the options of the cross entropy."""

        ponder_weight: Annotated[float, Ge(0), FINITE, Hint("the paper has 0 in most runs")] = 0.0
        """λ, the price of all iterations beyond the first; 0 only measures them."""

        def aux(self) -> Mapping[str, str]:
            """As in the base class: the iterations, if they have a price."""
            weight = self.ponder_weight
            return {"iterations": f"loss.ponder_weight={weight}"} if weight else {}

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        super().__init__(config, compile_config=compile_config)
        self.ponder_weight = config.ponder_weight

    def summary(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the mean iterations of the first and of the last layer, as text."""
        loops = [value for name, value in metrics.items() if name.startswith("loops/layer_")]
        said = [f"loops {loops[0]:.2f}→{loops[-1]:.2f}"] if loops else []
        return [*super().summary(metrics), *said]

    def compute(
        self, readout: LMHead, output: LoopOutput, batch: LossBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super().compute(readout, output, batch)
        labels_BL, valid_tokens, aux = batch.labels_BL, batch.valid_tokens, output.aux

        def mean(value_NBL: Tensor) -> Tensor:
            return token_mean(value_NBL, labels_BL, valid_tokens)

        share = mean(torch.ones(labels_BL.shape, device=labels_BL.device))
        if "iterations" in aux:
            iterations_N, most = mean(aux["iterations"]), aux["scales"].shape[-1]
            if most > 1:
                cost = (iterations_N.mean() - share) / (most - 1)
                metrics["loops/cost"] = cost.detach()
                loss = loss + self.ponder_weight * cost
            metrics |= _by_layer("loops/layer_", iterations_N)
            for layer, scale_T in enumerate(share * aux["scales"], start=1):
                metrics |= _by_layer(f"loop_scale/layer_{layer}_", scale_T)
        for name in ("local", "global"):
            if f"{name}_gates" in aux:
                metrics |= _by_layer(f"memory_gate/{name}_", mean(aux[f"{name}_gates"]))
        return loss, metrics


def _by_layer(prefix: str, values: Tensor) -> dict[str, Tensor]:
    return {f"{prefix}{n}": value for n, value in enumerate(values.detach().unbind(), start=1)}
