"""The learning rate as a function of global tokens, where torchtitan expects a scheduler."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
from torch.optim.lr_scheduler import LRScheduler
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

from titan_loop.models.exit_gate import EXIT_GATE_PATTERN, Trainable
from titan_loop.training.schedule import Schedule


@dataclass(kw_only=True, slots=True)
class AdamWConfig:
    """AdamW for the whole model.

    Weight decay applies to matrices, embedding and head included. Norm weights and the exit gate
    are
    excluded: decay would pull the norms' gain, and with it the gate's input scale, towards zero.

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


class TokenLearningRate(LRSchedulersContainer):
    """Sets every parameter group's learning rate to `schedule(tokens)`; keeps no state.

    Being a function of the global token count it needs nothing from a checkpoint and does not
    change with the number of ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        """The schedule; upstream's step-based fields are not used."""

        warmup_steps: int = 0
        schedule: Schedule = field(default_factory=lambda: Schedule.constant(3e-4))

        def build(self, *, optimizers: OptimizersContainer, training_steps: int) -> Any:
            """Build it; `training_steps` does not matter to a function of tokens."""
            return TokenLearningRate(optimizers, self.schedule)

    def __init__(self, optimizers: OptimizersContainer, schedule: Schedule) -> None:
        self.optimizers = list(optimizers)
        self.schedule = schedule
        self.schedulers: list[LRScheduler] = []

    def __iter__(self) -> Iterator[LRScheduler]:
        return iter(self.schedulers)

    def set_tokens(self, tokens: int) -> float:
        """Set and return the learning rate of the step that starts after `tokens` global tokens."""
        learning_rate = self.schedule(tokens)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
        return learning_rate

    def step(self) -> None:
        """Do nothing: the rate depends on tokens, not on calls."""

    def get_metrics(self) -> dict[str, float]:
        """Return the current rate."""
        return {"lr": float(self.optimizers[0].param_groups[0]["lr"])}

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is no state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Accept the empty state."""
