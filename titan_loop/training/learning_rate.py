"""The learning rate as a function of global tokens, where torchtitan expects a scheduler."""

from dataclasses import dataclass, field
from typing import Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
from torchtitan.components.optimizer import LRSchedulersContainer

from titan_loop.training.schedule import Schedule


class TokenLearningRate(LRSchedulersContainer):
    """Takes the place of torchtitan's schedulers: `StepPlan.learning_rate` sets the rate."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        """The schedule, for `config.json`; upstream's step-based fields are not used."""

        warmup_steps: int = 0
        schedule: Schedule = field(default_factory=lambda: Schedule.constant(3e-4))

        def build(self, **unused: Any) -> Any:
            """Build nothing: a scheduler would add its own entries to the optimisers' state."""
            return None
