"""A curriculum: training begins with a task's first level; an exam decides when the next follows.

    exam of the level, every `interval` steps ─┬─ every stratum right enough ─► next level
                                               └─ else, after `limit_tokens` ─► the run stops

The loader records the window at which a level begins. Every rank has the same counts, so ranks
decide alike, and a run that continues from a checkpoint before a promotion repeats the same exam at
the same step.
"""

import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch.distributed as dist
from torchtitan.tools.logging import logger

from titan_loop.data.load.jumps import jumped_before
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.task import Task
from titan_loop.errors import UserError, require_at_least
from titan_loop.evaluation.evals_log import PROMOTION, append_evaluation
from titan_loop.evaluation.exam import ACCURACY
from titan_loop.evaluation.task_report import TaskReport
from titan_loop.evaluation.training_tasks import ask_tasks, task_exam
from titan_loop.inference.exit_policy import parse_exit_policy, require_exit_policy
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.callback import Callback, TrainingState


@dataclass(kw_only=True, slots=True)
class Curriculum:
    """Conditions for a run to go on to the next level of its task."""

    interval: int = 0
    """Steps between two exams; 0 for an epoch of the level, where a window holds one example."""

    accuracy: float = 0.95
    """Share of right answers that every stratum of a level needs."""

    strict: bool = False
    """Whether that share must be exceeded, not only reached."""

    questions: int = 128
    """Examples of a stratum in the exam."""

    recurrent_steps: int = 0
    """Recurrent steps of the exam; 0 takes R of the newest training step."""

    exit: str = ""
    """Exit policy that halts answers of the exam earlier, such as kl:0.01,3; empty for none."""

    limit_tokens: int = 0
    """Tokens after which a level that has not passed stops the run; 0 for no limit."""

    restart_optimizer: bool = False
    """Forget the optimiser's moments when a level begins."""

    restart_learning_rate: bool = False
    """Start the schedule of the learning rate again when a level begins, with its warm-up."""

    def passes(self, accuracy: float) -> bool:
        """Return whether an accuracy is enough."""
        return accuracy > self.accuracy or (accuracy == self.accuracy and not self.strict)

    def check(self, task: Task, *, one_example: bool) -> None:
        """Raise `UserError` for a curriculum that cannot work with the task and its windows."""
        where = "dataloader.curriculum"
        if task.levels < 2:
            raise UserError(f"{where}: task {task.name} has one level: use TaskLoader")
        epochs = self.interval == 0 and one_example and task.level_examples(0)
        if self.interval < 1 and not epochs:
            raise UserError(
                f"{where}.interval={self.interval}: give the steps between two exams, at least 1"
            )
        if not 0 <= self.accuracy <= 1:
            raise UserError(f"{where}.accuracy={self.accuracy} must lie between 0 and 1")
        for name, least in (("questions", 1), ("recurrent_steps", 0), ("limit_tokens", 0)):
            require_at_least(least, **{f"{where}.{name}": getattr(self, name)})
        for level in range(task.levels - 1):  # refuses an exam that cannot be drawn
            task.check_exam(self.questions, strata=task.level_strata(level))


class CurriculumLoader(TaskLoader):
    """Draws the examples of a task's level, from the first level on."""

    @dataclass(kw_only=True, slots=True)
    class Config(TaskLoader.Config):
        """The task and its curriculum."""

        curriculum: Curriculum = field(default_factory=Curriculum)

        def callbacks(self) -> list[Any]:
            """Return the exams of the levels."""
            return [Promotion(self)]

    def __init__(self, config: Config, *, seq_len: int, **split: Any) -> None:
        config.curriculum.check(config.task, one_example=config.window == "example")
        self._promotions: list[int] = []
        self._restarts_rate = config.curriculum.restart_learning_rate
        super().__init__(config, seq_len=seq_len, **split)

    def describe(self, config: TaskLoader.Config, seq_len: int) -> dict[str, Any]:
        """As in the base class; other windows follow from the same seed."""
        return {**super().describe(config, seq_len), "curriculum": True}

    def locate(self, window: np.ndarray) -> np.ndarray:
        """Return (0, level, window number) of each global window (see the base class)."""
        identity = super().locate(window)
        identity[:, 1] = [bisect_right(self._promotions, number) for number in window.tolist()]
        return identity

    @property
    def level(self) -> int:
        """Level of the next window (see the base class)."""
        return bisect_right(self._promotions, self.windows_consumed)

    @property
    def level_start(self) -> int:
        """First window of the level; 0 for the level the job began with."""
        return self._promotions[-1] if self._promotions else 0

    @property
    def level_tokens(self) -> int:
        """Tokens consumed since the level began."""
        return (self.windows_consumed - self.level_start) * self._seq_len

    @property
    def rate_start_tokens(self) -> int:
        """Tokens at which the schedule of the learning rate began (see the base class)."""
        if not self._restarts_rate:
            return 0
        return (self.level_start - jumped_before(self.level_start, self.jumped)) * self._seq_len

    def promote(self) -> None:
        """Go on to the next level with the next window; equal on all ranks."""
        assert self.level + 1 < self._config.task.levels
        self._take_ahead()  # windows of the old level
        self._promotions.append(self.windows_consumed)

    def state_dict(self) -> dict[str, Any]:
        """As in the base class, with the windows at which levels began."""
        return {**super().state_dict(), "promotions": self._promotions}

    def _restore(self, state_dict: dict[str, Any]) -> None:
        self._promotions = list(state_dict.get("promotions", []))

    def _continue_from(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._restore(state_dict)
        del self._promotions[self._config.task.levels - 1 :]
        return {}


class Promotion(Callback):
    """Gives the level's exam when it is due, except at the last level; collective."""

    def __init__(self, config: CurriculumLoader.Config) -> None:
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
        assert isinstance(loader, CurriculumLoader)
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

    def _due(self, trainer: TrainingState, loader: CurriculumLoader) -> bool:
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

    def _missed(self, loader: CurriculumLoader, step: int, said: str) -> str:
        """Return the reason why the run stops here; empty if the level has tokens left."""
        limit, used = self._curriculum.limit_tokens, loader.level_tokens
        if not limit or used < limit:
            return ""
        return (
            f"the curriculum stops at step {step}: {said} after {used:,} tokens of the level, "
            f"{self._curriculum.accuracy:.1%} is required within {limit:,}; raise dataloader."
            "curriculum.limit_tokens to go on from the newest checkpoint, or change the training"
        )
