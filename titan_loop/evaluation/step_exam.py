"""A task's exam after every recurrent step: right answers, logit margins, and where policies halt.

    exam ─► one pass to step R ─► accuracy and margin after 1 … R, accuracy and steps of each policy

With hops or sizes as strata this shows how many steps a question needs, what more steps than were
trained are worth, and *overthinking*: a margin that falls again with further steps.

Source: recurrent-depth transformers, arXiv 2604.07822, §6.3 (Figures 5, 8 and 9) and Appendix F
(generalisation ratio).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX

from titan_loop.data.load.held_out import HeldOutWindows
from titan_loop.data.tasks.task import Task
from titan_loop.evaluation.exam import ACCURACY, Exam, right_at_readings
from titan_loop.evaluation.held_out import Forward, sum_windows
from titan_loop.evaluation.logit_lens import logit_margin
from titan_loop.evaluation.readings import Reading, depth_readings, policy_reading, states_at
from titan_loop.inference.exit_policy import require_exit_policy
from titan_loop.models.decoder import LoopDecoder


@dataclass(frozen=True)
class Halting:
    """What an exit policy makes of the questions of a stratum."""

    accuracy: float
    mean_steps: float


@dataclass(frozen=True)
class StepExam:
    """One stratum.

    Attributes:
        accuracy: Share of right answers after each of R steps.
        margin: Mean logit of the answer over that of the strongest other token, likewise.
        halting: Policy → what it makes of the questions; it decides for each on its own.
    """

    accuracy: np.ndarray
    margin: np.ndarray
    halting: Mapping[str, Halting]


def step_exam(
    model: LoopDecoder,
    task: Task,
    strata: Sequence[str],
    *,
    steps: int,
    count: int,
    policies: Sequence[str] = (),
) -> dict[str, StepExam]:
    """Return stratum → what is found after every step.

    Args:
        model: In evaluation mode.
        task: The task that the model was trained on.
        strata: Names of strata.
        steps: R, which may exceed the trained one.
        count: Number of questions of each stratum.
        policies: Exit policies as `--exit` takes them, within these R.

    Raises:
        UserError: A policy is unknown, or the model does not have it.
    """
    depths = depth_readings(range(1, steps + 1))
    adaptive = [policy_reading(name, steps) for name in policies]
    for reading in adaptive:
        require_exit_policy(model, reading.policy)
    readings, device = [*depths, *adaptive], model.tok_embeddings.weight.device
    exam = Exam(
        task,
        count,
        vocab_size=model.config.vocab_size,
        room=model.config.max_seq_len,
        strata=strata,
    )
    forward = right_at_readings(model, readings)
    graded = exam.grade(
        [reading.name for reading in readings],
        lambda windows: sum_windows(windows, forward, device=device),
    )
    found = {}
    for name, windows in exam.windows.items():
        sums_RW, _ = sum_windows(windows, _margins_at(model, depths), device=device)
        labels_W = (windows.labels != IGNORE_INDEX).sum(dim=1).numpy()
        results = graded[name]
        found[name.partition("/")[2] or next(iter(task.strata))] = StepExam(
            accuracy=np.array([results[depth.name].metrics[ACCURACY] for depth in depths]),
            margin=(sums_RW / labels_W).mean(axis=1),
            halting={
                reading.name: Halting(
                    results[reading.name].metrics[ACCURACY], results[reading.name].mean_steps or 0.0
                )
                for reading in adaptive
            },
        )
    return found


def _margins_at(model: LoopDecoder, depths: Sequence[Reading]) -> Forward:
    """Return the margins of the labels, summed over each window, at every depth."""

    @torch.no_grad()
    def forward(windows: HeldOutWindows) -> tuple[Tensor, Tensor]:
        chosen_BL = windows.labels != IGNORE_INDEX
        states = states_at(
            model, windows.input, chosen_BL, len(depths), windows.positions, windows.columns
        )
        labels_T, lengths = windows.labels[chosen_BL], chosen_BL.sum(dim=1).tolist()
        margins = [
            logit_margin(model.readout(state_TD.unsqueeze(0))[0], labels_T) for state_TD in states
        ]
        sums_RB = torch.stack(
            [part.double().sum(1) for part in torch.stack(margins).split(lengths, 1)], dim=1
        )
        return sums_RB, torch.zeros_like(sums_RB)

    return forward


@dataclass(frozen=True)
class Reach:
    """How far down a task's strata, from easy to hard, a model gets.

    Attributes:
        learned: Number of strata that are right at 95 % within the trained steps.
        reached: Number of strata that are right at 60 % after some number of steps.
    """

    learned: int
    reached: int

    @property
    def ratio(self) -> float:
        """The generalisation ratio; 1 is no extrapolation."""
        return self.reached / self.learned if self.learned else float("nan")


def reach(
    found: Sequence[StepExam], trained_steps: int, *, learned: float = 0.95, solved: float = 0.6
) -> Reach:
    """Count strata up to the first that misses the accuracy.

    Args:
        found: All strata of the task, from easy to hard.
        trained_steps: Largest R of training.
        learned: Accuracy that counts as learned.
        solved: Accuracy that counts as reached.
    """

    def count(passes: list[bool]) -> int:
        return next((index for index, passed in enumerate(passes) if not passed), len(passes))

    return Reach(
        count([bool(exam.accuracy[:trained_steps].max() >= learned) for exam in found]),
        count([bool(exam.accuracy.max() >= solved) for exam in found]),
    )
