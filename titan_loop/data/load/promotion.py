"""Promotion: training begins with a task's first level; an exam decides when the next follows.

    exam of the level, every `interval` steps ─┬─ every stratum right enough ─► next level
                                               └─ else, after `limit_tokens` ─► the run stops

`evaluation/promotion.py` gives the exam; the loader records the window at which a level begins.
"""

from dataclasses import dataclass

from titan_loop.data.tasks.task import Task
from titan_loop.errors import UserError, require_at_least


@dataclass(kw_only=True, slots=True)
class Curriculum:
    """Conditions for a run to go on to the next level of its task."""

    enabled: bool = False
    """Begin with the task's first level, instead of training on the last one from the start."""

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
        if not self.enabled:
            return
        field = "dataloader.curriculum"
        if task.levels < 2:
            raise UserError(f"{field}.enabled: task {task.name} has one level: leave it out")
        epochs = self.interval == 0 and one_example and task.level_examples(0)
        if self.interval < 1 and not epochs:
            raise UserError(
                f"{field}.interval={self.interval}: give the steps between two exams, at least 1"
            )
        if not 0 <= self.accuracy <= 1:
            raise UserError(f"{field}.accuracy={self.accuracy} must lie between 0 and 1")
        for name, least in (("questions", 1), ("recurrent_steps", 0), ("limit_tokens", 0)):
            require_at_least(least, **{f"{field}.{name}": getattr(self, name)})
        for level in range(task.levels - 1):  # refuses an exam that cannot be drawn
            task.check_exam(self.questions, strata=task.level_strata(level))
