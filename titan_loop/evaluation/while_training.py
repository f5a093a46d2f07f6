"""Evaluates a model while it trains, without a checkpoint in between.

The numbers go to `evals.jsonl`, and to TensorBoard and W&B as `held_out/SOURCE/METRIC/step_R` and
`suite/…`; `titan-loop eval --tasks … --depths …` gives the same for a checkpoint. Training goes on
as if nothing had happened: no random number is drawn, and the model's state does not change.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch.distributed as dist
from torchtitan.tools.logging import logger

from titan_loop.checkpoint.keep_policy import Best
from titan_loop.data.load.mixture_sources import named_sources
from titan_loop.errors import raise_first
from titan_loop.evaluation.evals_log import WHILE_TRAINING, append_evaluation
from titan_loop.evaluation.offline_tasks import HELD_OUT
from titan_loop.evaluation.suites import suite_refusals, task_names
from titan_loop.evaluation.task_report import TaskReport
from titan_loop.evaluation.training_tasks import (
    Ask,
    AskedToStop,
    ask_tasks,
    go_on_unless_stopped,
    held_out_text,
    task_exam,
)
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.callback import Callback, TrainingState
from titan_loop.training.config import RunConfig
from titan_loop.training.depth_schedule import RecurrenceConfig, typical_recurrent_steps
from titan_loop.training.evaluation_config import SuiteConfig


def evaluations(config: RunConfig) -> list[Callback]:
    """Return the callbacks for `held_out`, `suite` and the data of a run."""
    raise_first(suite_refusals(config))
    held_out, suite = config.held_out, config.suite
    callbacks: list[Callback] = []
    interval = config.checkpoint.interval if held_out.interval is None else held_out.interval
    sources = held_out.scored(config.dataloader.source_paths(), config.training.seq_len)
    if interval and sources:
        on_text = WhileTraining(
            lambda trainer: [held_out_text(trainer, sources, held_out.windows)],
            interval=interval,
            depths=held_out.depths,
            loss=HeldOutLoss.of(config, sources) if config.best else None,
        )
        callbacks.append(on_text)
    if suite.interval:
        on_suite = WhileTraining(
            lambda trainer: [_suite_task(trainer, suite, name) for name in task_names(suite)],
            interval=suite.interval,
            depths=suite.depths,
            prefix="suite/",
        )
        callbacks.append(on_suite)
    return callbacks + config.dataloader.callbacks()


def _suite_task(trainer: TrainingState, suite: SuiteConfig, name: str) -> Ask:
    data = trainer.config.dataloader
    if name == HELD_OUT:
        return held_out_text(trainer, data.source_paths(), suite.windows)
    generated = data.generated_task()
    assert generated is not None, "suite_refusals accepted another task"
    return task_exam(trainer, generated, suite.questions)


@dataclass(frozen=True)
class HeldOutLoss:
    """The number by which `--best` chooses, at the R that is being trained.

    loss = Σ_s w_s · (nats per token of source s) / Σ_s w_s, which is the cross entropy of the
    training mixture, measured on held-out text.

    Attributes:
        weights: w by the sources' names: the mixture's, or equal ones if it lacks a scored source.
    """

    recurrence: RecurrenceConfig
    weights: Mapping[str, float]
    measured_on: str

    @classmethod
    def of(cls, config: RunConfig, sources: Sequence[str]) -> "HeldOutLoss":
        """Return the loss of a run on the sources it scores."""
        mixture = config.dataloader.source_weights()
        known = all(path in mixture for path in sources) and any(mixture[p] for p in sources)
        weights = {
            name: mixture[path] if known else 1.0 for name, path in named_sources(sources).items()
        }
        parts = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
        return cls(config.recurrence, weights, f"{config.held_out.windows} windows of {parts}")

    def depth(self, trainer: TrainingState) -> int:
        """Return the scheduled R of the newest step; where R is drawn, its rounded mean."""
        return typical_recurrent_steps(self.recurrence, trainer.plan.tokens)

    def value(self, report: TaskReport, depth: int) -> float:
        """Return the loss in nats per token."""
        total = sum(
            weight * report.tasks[f"{HELD_OUT}/{name}"][f"static:{depth}"].metrics["nats_per_token"]
            for name, weight in self.weights.items()
        )
        return total / sum(self.weights.values())


@dataclass(eq=False)
class WhileTraining(Callback):
    """Asks tasks every `interval` steps and after the last one; collective.

    Attributes:
        prefix: Prefix of the names in TensorBoard and W&B.
        loss: Loss by which the run keeps its best checkpoint; its depth is added to the depths.
    """

    open_tasks: Callable[[TrainingState], list[Ask]]
    interval: int
    depths: Sequence[int]
    prefix: str = ""
    loss: HeldOutLoss | None = None
    _tasks: list[Ask] = field(default_factory=list, init=False)

    def on_train_start(self, trainer: TrainingState) -> None:
        """Read windows and questions once."""
        self._tasks = self.open_tasks(trainer)

    def on_step_end(self, trainer: TrainingState, metrics: Mapping[str, Any]) -> None:
        """Ask if it is time; rank 0 writes."""
        if trainer.step % self.interval and not trainer.at_last_step:
            return
        began = time.perf_counter()
        try:
            report = self.ask(trainer)
        except AskedToStop:  # the grace must be enough for the save
            logger.warning(
                "asked to stop: the evaluation of step %d was left out; titan-loop eval scores its "
                "checkpoint",
                trainer.step,
            )
            return
        if dist.get_rank() == 0:
            run, seconds = RunDirectory(trainer.config.dump_folder), time.perf_counter() - began
            append_evaluation(run, report, asked=WHILE_TRAINING, seconds=seconds)
            logger.info("evaluated, step %d: %s", trainer.step, report.summary())
        trainer.metrics_processor.log_numbers(self._curves(report), trainer.step)

    def ask(self, trainer: TrainingState) -> TaskReport:
        """Return the results of all tasks at every depth, equal on all ranks; collective."""
        if self.loss is None:
            return ask_tasks(trainer, self._tasks, sorted({*self.depths}), go_on_unless_stopped)
        depth = self.loss.depth(trainer)
        depths = sorted({*self.depths, depth})
        report = ask_tasks(trainer, self._tasks, depths, go_on_unless_stopped)
        value = self.loss.value(report, depth)
        if math.isfinite(value):
            trainer.checkpointer.measured = Best(
                step=trainer.step, held_out_loss=value, measured_on=self.loss.measured_on
            )
        return report

    def _curves(self, report: TaskReport) -> dict[str, float]:
        return {
            f"{self.prefix}{task}/{metric.removesuffix(',none')}/"
            f"step_{reading.removeprefix('static:')}": value
            for task, readings in report.tasks.items()
            for reading, result in readings.items()
            for metric, value in result.metrics.items()
            if not metric.endswith(("_low", "_high"))
        }
