"""The values of all schedules in one training step, and its cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.exit_gate import Trainable
from titan_loop.training.depth_schedule import RecurrenceConfig, typical_recurrent_steps


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One training step, from `RunConfig.plan_step`.

    Attributes:
        tokens: Global tokens consumed before it.
        backward_steps: k, the number of last recurrent steps that gradients pass; None for all.
        schedules: Values of the objective's schedules, and 0 for `OBJECTIVE_SCHEDULES` that it does
            not use.
    """

    step: int
    tokens: int
    windows: int
    recurrent_steps: int
    backward_steps: int | None
    learning_rate: float
    schedules: Mapping[str, float]


def step_flops(
    model: LoopDecoder.Config, plan: StepPlan, *, seq_len: int, trainable: Trainable
) -> float:
    """Return the model FLOPs of one step on all ranks together; recomputation does not count."""
    steps, reached = plan.recurrent_steps, plan.backward_steps
    flops = model.training_flops(seq_len, steps, trainable, reached)
    return flops.total * plan.windows * seq_len


def regime(config: RecurrenceConfig, plan: StepPlan, *, level: int) -> list[Any]:
    """Return the planned settings that move a step's loss, to compare steps; weights to 1 digit."""
    weights = [f"{name} {value:.1g}" for name, value in sorted(plan.schedules.items())]
    return [typical_recurrent_steps(config, plan.tokens), plan.backward_steps, level, *weights]
