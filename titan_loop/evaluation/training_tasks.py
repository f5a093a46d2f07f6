"""Tasks asked of a model while it trains: held-out text and its own exam.

Every task reads its windows once and is then asked at several depths, all from one pass. FSDP,
tensor and context parallelism stay as they are. Data-parallel ranks share the windows, and every
rank runs the same number of passes, so that no collective is left waiting.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
from torch import Tensor
from torchtitan.distributed import utils as dist_utils

from titan_loop.data.load.held_out_windows import HeldOutWindows
from titan_loop.data.tasks.task import Task
from titan_loop.evaluation.exam import Exam, model_sizes
from titan_loop.evaluation.offline_tasks import HELD_OUT
from titan_loop.evaluation.readings import depth_readings, policy_reading
from titan_loop.evaluation.task_report import Results, TaskReport
from titan_loop.evaluation.window_scores import (
    Forward,
    Sums,
    Totals,
    WindowScores,
    at_depths,
    at_readings,
    open_sources,
    sum_windows,
    summarise,
)
from titan_loop.training.callback import TrainingState
from titan_loop.training.verdict import agree_to_stop

BeforeBatch: TypeAlias = Callable[[TrainingState], None]

_ROW_MULTIPLE = 16  # tokens that rows are rounded up to a multiple of


class AskedToStop(Exception):  # noqa: N818 (a request, not an error)
    """A signal came while tasks were asked; raised on all ranks together."""


def go_on(trainer: TrainingState) -> None:
    """Report progress."""
    trainer.stop_listener.progress()  # an exam may take longer than `hang_seconds`


def go_on_unless_stopped(trainer: TrainingState) -> None:
    """Report progress; raise `AskedToStop` if any rank was asked to stop. Collective."""
    go_on(trainer)
    if agree_to_stop(trainer.stop_listener.requested_by is not None, trainer.device):
        raise AskedToStop


def sums_in_training(
    trainer: TrainingState,
    windows: HeldOutWindows,
    forward: Forward,
    before_batch: BeforeBatch = go_on,
) -> Totals:
    """Return the sums of `forward` with the model that is being trained; collective.

    Data-parallel ranks share the windows, context-parallel ones each window, whose length is a
    multiple of `window_multiple`. All ranks call `before_batch` equally often.
    """

    def in_context(batch: HeldOutWindows) -> tuple[Tensor, Tensor]:
        before_batch(trainer)
        with trainer.train_context():
            return forward(batch)

    return sum_windows(
        windows,
        in_context,
        device=trainer.device,
        batch_windows=trainer.config.training.local_batch_size,
        divide=partial(_divide, trainer),
    )


def window_multiple(trainer: TrainingState) -> int:
    """Return the number of tokens that every window's length must be a multiple of."""
    if trainer.window_share is not None:  # context parallelism splits the training window
        return trainer.config.training.seq_len
    return _ROW_MULTIPLE * trainer.parallel_dims.tp


def _divide(
    trainer: TrainingState, rows: Sequence[int], work: Callable[[Sequence[int]], list[Sums]]
) -> list[Sums]:
    """Give a rank every dp-th row; some repeat the last row, so that all have equally many."""
    degree, rank = 1, 0
    if trainer.parallel_dims.dp_enabled:
        mesh = trainer.parallel_dims.get_mesh("batch")
        degree, rank = mesh.size(), mesh.get_local_rank()
    mine = range(rank, -(-len(rows) // degree) * degree, degree)
    sums = torch.tensor(
        work([rows[min(index, len(rows) - 1)] for index in mine]),
        dtype=torch.float64,
        device=trainer.device,
    )
    totals = sums.new_zeros(len(rows), *sums.shape[1:])
    there = [index for index in mine if index < len(rows)]
    totals[there] = sums[: len(there)]
    if (loss_mesh := trainer.parallel_dims.get_optional_mesh("loss")) is not None:
        totals = dist_utils.dist_sum_tensor(totals, loss_mesh)
    return [(nats_P, steps_P) for nats_P, steps_P in totals.tolist()]


Ask: TypeAlias = Callable[[TrainingState, Sequence[int], BeforeBatch], Results]
"""A task whose windows have been read: returns its results at each depth, equal on all ranks."""


@torch.no_grad()
def ask_tasks(
    trainer: TrainingState,
    tasks: Sequence[Ask],
    depths: Sequence[int],
    before_batch: BeforeBatch = go_on,
) -> TaskReport:
    """Return the results of all tasks at every depth, equal on all ranks; collective."""
    report = TaskReport(
        step=trainer.step,
        tokens=trainer.tokens,
        trained_recurrent_steps=trainer.plan.recurrent_steps,
        manifest_sha256="",
    )
    trainer.model.eval()
    try:
        for task in tasks:
            report.tasks.update(task(trainer, depths, before_batch))
    finally:
        trainer.model.train()
    return report


def held_out_text(trainer: TrainingState, sources: Sequence[str], count: int) -> Ask:
    """Return a task that measures the bits per byte of every source."""
    opened = open_sources(sources, seq_len=trainer.config.training.seq_len, count=count)

    def ask(trainer: TrainingState, depths: Sequence[int], before_batch: BeforeBatch) -> Results:
        forward = at_depths(trainer.model, depths, trainer.window_share)
        names = [reading.name for reading in depth_readings(depths)]
        results: Results = {}
        for name, windows in opened.items():
            sums = sums_in_training(trainer, windows, forward, before_batch)
            scores = WindowScores.of(windows, sums)
            results[f"{HELD_OUT}/{name}"] = summarise(scores, names)
        return results

    return ask


def task_exam(
    trainer: TrainingState,
    task: Task,
    count: int,
    strata: Sequence[str] | None = None,
    policy: str = "",
) -> Ask:
    """Return the exam of the run's generated task; an exit `policy` replaces reading each depth."""
    exam = Exam(
        task,
        count,
        vocab_size=trainer.model.config.vocab_size,
        room=trainer.config.training.seq_len,
        multiple=window_multiple(trainer),
        strata=strata,
        leave_out=strata is None,
    )

    def ask(trainer: TrainingState, depths: Sequence[int], before_batch: BeforeBatch) -> Results:
        model, share = trainer.model, trainer.window_share
        readings = [policy_reading(policy, max(depths))] if policy else depth_readings(depths)
        right = at_readings(model, readings, share, "right_PT")
        nats = at_depths(model, depths, share)

        def sums(forward: Forward) -> Callable[[HeldOutWindows], Totals]:
            return lambda windows: sums_in_training(trainer, windows, forward, before_batch)

        return exam.grade(
            [reading.name for reading in readings],
            sums(right),
            None if policy else sums(nats),
            model_sizes(model),
        )

    return ask
