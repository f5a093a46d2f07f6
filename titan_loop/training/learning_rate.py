"""The learning rate as a function of global tokens, where torchtitan expects a scheduler."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
from torch.optim.lr_scheduler import LRScheduler
from torchtitan.components.optimizer import LRSchedulersContainer

from titan_loop.training.optimizer import LoopOptimizers
from titan_loop.training.schedule import Schedule


class TokenLearningRate(LRSchedulersContainer):
    """Sets every group's learning rate to `schedule(tokens)` times its factor; keeps no state.

    Being a function of the global token count it needs nothing from a checkpoint and does not
    change with the number of ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        """The schedule; upstream's step-based fields are not used."""

        warmup_steps: int = 0
        schedule: Schedule = field(default_factory=lambda: Schedule.constant(3e-4))

        def build(self, *, optimizers: LoopOptimizers, training_steps: int) -> Any:
            """Build it; `training_steps` does not matter to a function of tokens."""
            return TokenLearningRate(optimizers, self.schedule)

    def __init__(self, optimizers: LoopOptimizers, schedule: Schedule) -> None:
        self.optimizers = optimizers
        self.schedule = schedule
        self.schedulers: list[LRScheduler] = []

    def __iter__(self) -> Iterator[LRScheduler]:
        return iter(self.schedulers)

    def set_tokens(self, tokens: int) -> float:
        """Set and return the learning rate of the step that starts after `tokens` global tokens."""
        learning_rate = self.schedule(tokens)
        self.optimizers.set_learning_rate(learning_rate)
        return learning_rate

    def step(self) -> None:
        """Do nothing: the rate depends on tokens, not on calls."""

    def get_metrics(self) -> dict[str, float]:
        """Return the current rate."""
        return {"lr": float(self.optimizers.optimizers[0].param_groups[0]["lr"])}

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is no state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Accept the empty state."""
