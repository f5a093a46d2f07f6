"""AdamW in the parameter groups of torchtitan's optimiser container."""

from dataclasses import dataclass
from typing import Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from titan_loop.models.exit_gate import EXIT_GATE_PATTERN, Trainable


@dataclass(kw_only=True, slots=True)
class AdamWConfig:
    """AdamW for the whole model.

    Weight decay applies to matrices, embedding and head included. Norm weights and the exit gate
    are excluded: decay would pull the norms' gain, and with it the gate's input scale, towards 0.

    Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, Table 1 (values); the exclusions are ours.
    """

    weight_decay: float = 0.1
    """Decoupled weight decay of matrices."""

    beta1: float = 0.9
    """Decay of the first moment."""

    beta2: float = 0.95
    """Decay of the second moment."""

    eps: float = 1e-8
    """Added to the denominator."""

    def optimizer_config(
        self, *, exit_gate: bool, trainable: Trainable = "all"
    ) -> OptimizersContainer.Config:
        """Return torchtitan's optimiser config; the learning rate is set before every step.

        Args:
            exit_gate: Whether the model has one.
            trainable: Frozen parameters get no group, hence no state and no checkpoint entries.
        """
        common: dict[str, Any] = {"lr": 0.0, "betas": (self.beta1, self.beta2), "eps": self.eps}
        if trainable == "exit_gate":
            group = ParamGroupConfig(
                pattern=EXIT_GATE_PATTERN,
                optimizer_name="AdamW",
                optimizer_kwargs={**common, "weight_decay": 0.0},
            )
            return OptimizersContainer.Config(param_groups=[group])
        undecayed = r"norm\.weight$" + (f"|{EXIT_GATE_PATTERN}" if exit_gate else "")
        return OptimizersContainer.Config(
            param_groups=[
                ParamGroupConfig(
                    pattern=undecayed,
                    optimizer_name="AdamW",
                    optimizer_kwargs={**common, "weight_decay": 0.0},
                ),
                ParamGroupConfig(
                    pattern=r".*",
                    optimizer_name="AdamW",
                    optimizer_kwargs={**common, "weight_decay": self.weight_decay},
                ),
            ]
        )


def apply_settings(optimizers: OptimizersContainer, config: OptimizersContainer.Config) -> None:
    """Let this start's config decide: a loaded checkpoint brought its own weight decay and betas.

    Args:
        optimizers: One optimiser, built from `config`.
        config: From `AdamWConfig.optimizer_config`.
    """
    (optimizer,) = optimizers
    for group, settings in zip(optimizer.param_groups, config.param_groups, strict=True):
        group.update(settings.optimizer_kwargs)
