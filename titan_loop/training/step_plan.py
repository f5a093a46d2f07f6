"""The values of all schedules in one training step, and what that step costs and trains."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from titan_loop.models.decoder import LoopDecoder
from titan_loop.training.batch_schedule import global_batch_windows
from titan_loop.training.config import OBJECTIVE_SCHEDULES, RunConfig
from titan_loop.training.recurrence import (
    RecurrenceConfig,
    recurrent_steps_at,
    typical_recurrent_steps,
)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One training step.

    Attributes:
        step: Number of the step, from 1.
        tokens: Global tokens consumed before it.
        rate_tokens: Those of them that the schedule of the learning rate counts.
        windows: Windows in its global batch.
        recurrent_steps: R.
        backward_steps: k, the number of last steps that are trained through; None for all.
        learning_rate: Learning rate of every parameter.
        schedules: Values of the objective's schedules by name, and 0 for each of
            `OBJECTIVE_SCHEDULES` that it has no use for.
    """

    step: int
    tokens: int
    rate_tokens: int
    windows: int
    recurrent_steps: int
    backward_steps: int | None
    learning_rate: float
    schedules: Mapping[str, float]


def plan_step(
    config: RunConfig,
    *,
    step: int,
    tokens: int,
    seed: int,
    rate_start_tokens: int = 0,
    deepest: Callable[[int], int] | None = None,
) -> StepPlan:
    """Read the schedules of `config`.

    Args:
        config: A run without refusals.
        step: Number of the step, from 1.
        tokens: Global tokens consumed before it.
        seed: Seed of the draw, where R is random.
        rate_start_tokens: Tokens at which the schedule of the learning rate began.
        deepest: Returns the steps that the deepest of so many windows, the next ones, needs; asked
            where R follows from the data.
    """
    recurrence = config.recurrence
    windows = global_batch_windows(config.batch, tokens, config.training.seq_len)
    depth = deepest(windows) if recurrence.from_data and deepest is not None else None
    recurrent_steps = recurrent_steps_at(
        recurrence, tokens=tokens, step=step, seed=seed, deepest=depth
    )
    return StepPlan(
        step=step,
        tokens=tokens,
        rate_tokens=tokens - rate_start_tokens,
        windows=windows,
        recurrent_steps=recurrent_steps,
        backward_steps=recurrence.backward_steps_at(tokens),
        learning_rate=config.learning_rate(tokens - rate_start_tokens),
        schedules=dict.fromkeys(OBJECTIVE_SCHEDULES, 0.0)
        | {name: schedule(tokens) for name, schedule in config.objective_schedules().items()},
    )


def step_flops(config: RunConfig, model: LoopDecoder.Config, plan: StepPlan) -> float:
    """Return the model FLOPs of one step on all ranks together; recomputation does not count."""
    seq_len, reached = config.training.seq_len, plan.backward_steps
    flops = model.training_flops(seq_len, plan.recurrent_steps, config.trainable, reached)
    return flops.total * plan.windows * seq_len


def regime(config: RunConfig, plan: StepPlan, *, level: int) -> list[Any]:
    """Return what moves the loss of a step by plan, to a digit; spikes are judged within one.

    Args:
        config: The run.
        plan: The step.
        level: Level of the curriculum.
    """
    weights = [f"{name} {value:.1g}" for name, value in sorted(plan.schedules.items())]
    depth = typical_recurrent_steps(config.recurrence, plan.tokens)
    return [depth, plan.backward_steps, level, *weights]


def trained_recurrence(config: RecurrenceConfig, plan: StepPlan) -> dict[str, Any]:
    """Return what a checkpoint records of R.

    `recurrent_steps` is the depth at which to use the model: R of the newest step or, where R is
    drawn, its rounded mean within the limits. `recurrence` has that step's R, its mean and limits.

    Args:
        config: How R is chosen.
        plan: The newest training step.
    """
    return {
        "recurrent_steps": typical_recurrent_steps(config, plan.tokens),
        "recurrence": {
            "last_steps": plan.recurrent_steps,
            "mean_steps": config.steps(plan.tokens),
            "min_steps": config.min_steps,
            "max_steps": config.max_steps,
        },
    }
