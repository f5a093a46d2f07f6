"""Suites: named lists of lm-evaluation-harness tasks with the shots and the metric of the paper.

`ouro_base` is Appendix C of Ouro, `depth` its tables over R = 1 … 8, `scaling` the benchmarks of
its Appendix D; all three need the hub or a filled cache. `offline` needs neither.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, Table 16, §5.3 and Appendix D.1.

Deviations:
- The paper does not say whether it reports acc or acc_norm. Both are recorded; `metric` follows the
  harness' custom: acc_norm where answers differ in length (ARC, HellaSwag, OpenBookQA, PIQA), acc
  elsewhere.
- The paper grades MMLU-Pro and BBH by "strict match". The harness has no filter of that name for
  them: `custom-extract` and `get-answer` are their only ones. Like the strict match of GSM8K, they
  accept nothing but the phrase "answer is …".
- The authors graded MATH500 with 5 examples and code of their own, HumanEval(+) and MBPP(+) with
  evalplus. Here it is the harness' `minerva_math500`, which has 4 examples, and its own tasks on
  evalplus' data.
- Appendix D states no number of examples: `scaling` asks with none. LAMBADA is OpenAI's version.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_loop.errors import Refusal, UserError, nearest, require_at_least
from titan_loop.evaluation.offline_tasks import HELD_OUT, OFFLINE_TASKS

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
        optional: Whether a run that cannot be asked skips the task instead of failing it: it came
            with a suite and was not named itself.
    """

    name: str
    num_fewshot: int | None = None
    metric: str = "acc,none"
    optional: bool = False


SUITES: dict[str, tuple[SuiteTask, ...]] = {
    "ouro_base": (
        SuiteTask("mmlu", 5),
        SuiteTask("mmlu_pro", 5, "exact_match,custom-extract"),
        SuiteTask("bbh_cot_fewshot", 3, "exact_match,get-answer"),
        SuiteTask("arc_challenge", 25, "acc_norm,none"),
        SuiteTask("hellaswag", 10, "acc_norm,none"),
        SuiteTask("winogrande", 5),
        SuiteTask("gsm8k_cot", 3, "exact_match,strict-match"),
        SuiteTask("minerva_math500", None, "math_verify,none"),
        SuiteTask("humaneval", 0, "pass@1,create_test"),
        SuiteTask("humaneval_plus", 0, "pass@1,create_test"),
        SuiteTask("mbpp", 3, "pass_at_1,none"),
        SuiteTask("mbpp_plus", 3, "pass_at_1,none"),
    ),
    "depth": (
        SuiteTask("arc_challenge", 25, "acc_norm,none"),
        SuiteTask("arc_easy", 8, "acc_norm,none"),
        SuiteTask("commonsense_qa", 10),
        SuiteTask("hellaswag", 10, "acc_norm,none"),
        SuiteTask("mmlu", 5),
        SuiteTask("winogrande", 5),
    ),
    "scaling": (
        SuiteTask("arc_challenge", 0, "acc_norm,none"),
        SuiteTask("arc_easy", 0, "acc_norm,none"),
        SuiteTask("hellaswag", 0, "acc_norm,none"),
        SuiteTask("lambada_openai", 0),
        SuiteTask("openbookqa", 0, "acc_norm,none"),
        SuiteTask("piqa", 0, "acc_norm,none"),
    ),
    "offline": (
        SuiteTask("held_out", metric="bits_per_byte"),
        SuiteTask("mano", metric="acc,none"),
        SuiteTask("multi_hop", metric="acc,none"),
        SuiteTask("mmlu_dev", metric="acc,none"),
    ),
}
CODE_TASKS = frozenset(("humaneval", "humaneval_plus", "mbpp", "mbpp_plus"))
"""Tasks of the suites that run the programs the model wrote: only with the user's consent."""
DEPTH_SUITE_STEPS = tuple(range(1, 9))
"""R of the suite `depth` unless told otherwise; beyond the trained R it extrapolates."""


class NotAskedError(UserError):
    """This run cannot be asked a task, though both are sound."""


def expand_tasks(names: list[str], num_fewshot: int | None = None) -> list[SuiteTask]:
    """Return the tasks behind names of suites and tasks, each once.

    Args:
        names: Suites, tasks of the harness, offline tasks.
        num_fewshot: Replaces every task's own number of examples.

    Raises:
        UserError: No name, or a negative number of examples.
    """
    if not names:
        raise UserError(f"no task was named; give tasks or suites: {', '.join(SUITES)}")
    require_at_least(0, num_fewshot=num_fewshot)
    tasks: dict[str, SuiteTask] = {}
    for name in names:
        for task in SUITES.get(name, (SuiteTask(name),)):
            shots = task.num_fewshot if num_fewshot is None else num_fewshot
            optional = task.name not in names
            tasks.setdefault(task.name, SuiteTask(task.name, shots, task.metric, optional))
    return list(tasks.values())


def task_names(suite: "SuiteConfig") -> list[str]:
    """Return the tasks that a suite while training asks, each once."""
    return [task.name for task in expand_tasks(suite.tasks)]


def suite_refusals(config: "RunConfig") -> Iterator[Refusal]:
    """Yield tasks of `suite` that a run cannot be asked while it trains; touches no device.

    Args:
        config: The run; its data need not be there.
    """
    suite, field = config.suite, "suite.tasks"
    if not suite.enabled:
        return
    known, generated = (HELD_OUT, *OFFLINE_TASKS), config.dataloader.generated_task()
    try:
        for name in task_names(suite):
            if generated is not None and generated.name == name:
                generated.check_exam(suite.questions)  # refuses more questions than there are
            elif name not in known:
                yield Refusal(
                    field, f"{field}: {name} cannot be asked while training{nearest(name, known)}"
                )
            elif not config.dataloader.source_paths():
                yield Refusal(
                    field,
                    f"{field}: {name} needs a prepared source, for its text or its tokenizer, and "
                    "this data has none",
                    f"take it out of {field}",
                )
            elif name != HELD_OUT:
                OFFLINE_TASKS[name]()  # refuses a task whose questions are not installed
    except UserError as error:
        yield Refusal(field, str(error))


def unknown_task(name: str, known: list[str]) -> UserError:
    """Return the error for an unknown task."""
    return UserError(f"task {name!r} is unknown{nearest(name, [*known, *SUITES, *OFFLINE_TASKS])}")
