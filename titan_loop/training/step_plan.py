"""The values of all schedules in one training step, and its cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_loop.errors import UserError
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.exit_gate import Trainable
from titan_loop.training.depth_schedule import RecurrenceConfig, typical_recurrent_steps


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One training step, from `RunConfig.plan_step`.

    Attributes:
        tokens: Global tokens consumed before it.
        recurrent_steps: R; the rounded mean if there are `depths`.
        backward_steps: k, the number of last recurrent steps that gradients pass; None for all.
        schedules: Values of the objective's schedules, and 0 for `OBJECTIVE_SCHEDULES` that it does
            not use.
        depths: R of each part of the global batch, which is cut into equal parts in the order of
            its windows; () if all have `recurrent_steps`.
    """

    step: int
    tokens: int
    windows: int
    recurrent_steps: int
    backward_steps: int | None
    learning_rate: float
    schedules: Mapping[str, float]
    depths: tuple[int, ...] = ()

    def recurrent_steps_of(self, number: int, micro_batches: int) -> int:
        """Return R of a rank's micro-batch `number`, counted from 0, of `micro_batches`.

        Raises:
            UserError: The parts of the global batch are not whole micro-batches.
        """
        if not self.depths:
            return self.recurrent_steps
        if micro_batches % len(self.depths):
            raise UserError(
                f"a step of {micro_batches} micro-batches cannot have {len(self.depths)} depths: "
                "draw fewer, or set training.local_batch_size so that they divide its micro-batches"
            )
        return self.depths[number * len(self.depths) // micro_batches]


def step_flops(
    model: LoopDecoder.Config, plan: StepPlan, *, seq_len: int, trainable: Trainable
) -> float:
    """Return the model FLOPs of one step on all ranks together; recomputation does not count."""
    depths, reached = plan.depths or (plan.recurrent_steps,), plan.backward_steps
    totals = [model.training_flops(seq_len, R, trainable, reached).total for R in depths]
    return sum(totals) / len(totals) * plan.windows * seq_len


def regime(config: RecurrenceConfig, plan: StepPlan, *, level: int) -> list[Any]:
    """Return the planned settings that move a step's loss, to compare steps; weights to 1 digit."""
    weights = [f"{name} {value:.1g}" for name, value in sorted(plan.schedules.items())]
    return [typical_recurrent_steps(config, plan.tokens), plan.backward_steps, level, *weights]
