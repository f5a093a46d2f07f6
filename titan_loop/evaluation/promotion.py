"""The exam of a curriculum's level: it promotes the run, or stops it at the level's limit.

Every rank has the same counts, so ranks decide alike. A run that continues from a checkpoint before
a promotion repeats the same exam at the same step.
"""

import time
from collections.abc import Mapping
from typing import Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch.distributed as dist
from torchtitan.tools.logging import logger

from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.errors import UserError
from titan_loop.evaluation.evals_log import PROMOTION, append_evaluation
from titan_loop.evaluation.exam import ACCURACY
from titan_loop.evaluation.task_report import TaskReport
from titan_loop.evaluation.training_tasks import ask_tasks, task_exam
from titan_loop.inference.exit_policy import parse_exit_policy, require_exit_policy
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.callback import Callback, TrainingState


class Promotion(Callback):
    """Gives the level's exam when it is due, except at the last level; collective."""

    def __init__(self, config: TaskLoader.Config) -> None:
        self._task = config.task
        self._curriculum = config.curriculum
        self._exit = parse_exit_policy(config.curriculum.exit or "full")

    def on_train_start(self, trainer: TrainingState) -> None:
        """Log the current level; refuse an exit policy that the model does not have."""
        require_exit_policy(trainer.model, self._exit)
        level = trainer.dataloader.level + 1
        logger.info("curriculum: level %d of %d of %s", level, self._task.levels, self._task.name)

    def on_step_end(self, trainer: TrainingState, metrics: Mapping[str, Any]) -> None:
        """Give the exam if it is due; then promote the run, or stop it at the limit."""
        loader = trainer.dataloader
        assert isinstance(loader, TaskLoader)
        level = loader.level
        if level + 1 == self._task.levels or not self._due(trainer, loader):
            return
        began = time.perf_counter()
        report = self._ask(trainer, level)
        accuracy, name = min(
            (reading.metrics[ACCURACY], name)
            for name, readings in report.tasks.items()
            for reading in readings.values()
        )
        said = f"level {level + 1} of {self._task.levels}: {name} {accuracy:.1%}"
        passed = self._curriculum.passes(accuracy)
        missed = "" if passed else self._missed(loader, trainer.step, said)
        if missed:
            report.failures[self._task.name] = missed
        if dist.get_rank() == 0:
            run, seconds = RunDirectory(trainer.config.dump_folder), time.perf_counter() - began
            append_evaluation(run, report, asked=PROMOTION, seconds=seconds)
        if missed:
            raise UserError(missed)
        logger.info("curriculum, step %d: %s%s", trainer.step, said, ", passed" if passed else "")
        if passed:
            loader.promote()
            if self._curriculum.restart_optimizer:
                trainer.optimizers.restart()
        trainer.metrics_processor.log_numbers(
            {"curriculum/level": loader.level + 1.0}, trainer.step
        )

    def _due(self, trainer: TrainingState, loader: TaskLoader) -> bool:
        if self._curriculum.interval:
            return trainer.step % self._curriculum.interval == 0
        # The last batch of an epoch counts as a whole one.
        windows = trainer.plan.windows
        steps = loader.level_tokens // (windows * trainer.config.training.seq_len)
        return steps % -(-self._task.level_examples(loader.level) // windows) == 0

    def _ask(self, trainer: TrainingState, level: int) -> TaskReport:
        asked, strata = self._curriculum, self._task.level_strata(level)
        exam = task_exam(trainer, self._task, asked.questions, strata, asked.exit)
        return ask_tasks(trainer, [exam], [asked.recurrent_steps or trainer.plan.recurrent_steps])

    def _missed(self, loader: TaskLoader, step: int, said: str) -> str:
        """Return the reason why the run stops here; empty if the level has tokens left."""
        limit, used = self._curriculum.limit_tokens, loader.level_tokens
        if not limit or used < limit:
            return ""
        return (
            f"the curriculum stops at step {step}: {said} after {used:,} tokens of the level, "
            f"{self._curriculum.accuracy:.1%} is required within {limit:,}; raise dataloader."
            "curriculum.limit_tokens to go on from the newest checkpoint, or change the training"
        )
