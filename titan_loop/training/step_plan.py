"""What one training step takes from the schedules: a pure function of config, step and tokens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_loop.objectives.expected_loss import ExpectedExitLoss
from titan_loop.training.batch_schedule import global_batch_windows
from titan_loop.training.recurrence import recurrent_steps_at

if TYPE_CHECKING:
    from titan_loop.training.trainer import LoopTrainer


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One training step.

    Attributes:
        step: 1-based number of the step.
        tokens: Global tokens consumed before it.
        windows: Windows in its global batch.
        recurrent_steps: R.
        entropy_weight: β; 0 for a loss that has none.
        learning_rate: Of every parameter.
    """

    step: int
    tokens: int
    windows: int
    recurrent_steps: int
    entropy_weight: float
    learning_rate: float


def plan_step(config: "LoopTrainer.Config", *, step: int, tokens: int, seed: int) -> StepPlan:
    """Read the schedules of `config`.

    Args:
        config: A resolved run.
        step: 1-based number of the step.
        tokens: Global tokens consumed before it.
        seed: Draws R where it is random.
    """
    has_entropy = isinstance(config.loss, ExpectedExitLoss.Config)
    return StepPlan(
        step=step,
        tokens=tokens,
        windows=global_batch_windows(config.batch, tokens, config.training.seq_len),
        recurrent_steps=recurrent_steps_at(config.recurrence, tokens=tokens, step=step, seed=seed),
        entropy_weight=config.entropy_weight(tokens) if has_entropy else 0.0,
        learning_rate=config.learning_rate(tokens),
    )
