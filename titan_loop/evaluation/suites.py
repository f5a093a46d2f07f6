"""Suites: named lists of harness tasks; families register their papers' (`Plugin.suites`)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_loop.errors import Refusal, UserError, nearest, require_at_least
from titan_loop.evaluation.offline_tasks import HELD_OUT, OFFLINE_TASKS
from titan_loop.plugins import find, names

if TYPE_CHECKING:  # these import torchtitan, which takes seconds
    from titan_loop.training.config import RunConfig
    from titan_loop.training.evaluation_config import SuiteConfig


@dataclass(frozen=True)
class SuiteTask:
    """One task of a suite.

    Attributes:
        name: Name of a task, group or tag of the harness, or of an offline task.
        num_fewshot: Number of examples before each question; None keeps the task's own.
        metric: Metric that the suite reports, as the harness names it: metric, comma, filter.
        optional: True if only a suite named the task: a run that cannot be asked it skips it.
    """

    name: str
    num_fewshot: int | None = None
    metric: str = "acc,none"
    optional: bool = False


OFFLINE = (SuiteTask(HELD_OUT, metric="bits_per_byte"), *map(SuiteTask, OFFLINE_TASKS))
"""The suite `offline`, which needs neither the hub nor a cache."""

CODE_TASKS = frozenset(("humaneval", "humaneval_plus", "mbpp", "mbpp_plus"))
"""Tasks that run the programs the model writes; they need the user's consent."""


class NotAskedError(UserError):
    """This run cannot be asked this task, although neither is faulty."""


def expand_tasks(asked: list[str], num_fewshot: int | None = None) -> list[SuiteTask]:
    """Return the tasks behind names of suites and tasks, each once."""
    if not asked:
        raise UserError(f"no task was named; give tasks or suites: {', '.join(suite_names())}")
    require_at_least(0, num_fewshot=num_fewshot)
    tasks: dict[str, SuiteTask] = {}
    for name in asked:
        for task in OFFLINE if name == "offline" else find("suites", name) or (SuiteTask(name),):
            shots = task.num_fewshot if num_fewshot is None else num_fewshot
            optional = task.name not in asked
            tasks.setdefault(task.name, SuiteTask(task.name, shots, task.metric, optional))
    return list(tasks.values())


def task_names(suite: "SuiteConfig") -> list[str]:
    """Return the names of the tasks that a suite asks while training, each once."""
    return [task.name for task in expand_tasks(suite.tasks)]


def suite_refusals(config: "RunConfig") -> Iterator[Refusal]:
    """Yield a refusal for each task of `suite` that the run cannot be asked while it trains."""
    suite, field = config.suite, "suite.tasks"
    if not suite.interval:
        return
    generated = config.dataloader.generated_task()
    known = [HELD_OUT] if generated is None else [HELD_OUT, generated.name]
    try:
        for name in task_names(suite):
            if generated is not None and generated.name == name:
                generated.check_exam(suite.questions)  # refuses more questions than there are
            elif name != HELD_OUT:
                problem = f"{field}: {name} cannot be asked while training{nearest(name, known)}"
                yield Refusal(field, problem, "ask it of a checkpoint, with titan-loop eval")
            elif not config.dataloader.source_paths():
                problem = f"{field}: {name} needs a prepared source, and this data has none"
                yield Refusal(field, problem, f"take it out of {field}")
    except UserError as error:
        yield Refusal(field, str(error))


def suite_names() -> list[str]:
    """Return the names of all suites."""
    return [*names("suites"), "offline"]
