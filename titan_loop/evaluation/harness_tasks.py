"""Loads tasks of lm-evaluation-harness and runs them under every reading."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from titan_loop.errors import UserError, nearest
from titan_loop.evaluation.harness_model import LoopLM
from titan_loop.evaluation.offline_tasks import OFFLINE_TASKS, offline_config
from titan_loop.evaluation.suites import NotAskedError, SuiteTask, suite_names
from titan_loop.evaluation.task_report import ReadingResult, Results

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

logger = logging.getLogger(__name__)

_BOOTSTRAPS = 100  # for metrics whose standard error has no formula


class HarnessTasks:
    """Finds tasks by name; indexes the whole harness, which is slow, only when it has to."""

    def __init__(
        self,
        include_path: Path | None = None,
        *,
        home: Path | None = None,
        confirm_run_unsafe_code: bool = False,
    ) -> None:
        if home is None:
            import lm_eval.tasks

            home = Path(lm_eval.tasks.__file__).parent
        self._home = home
        self._include_path = include_path
        self._consent = confirm_run_unsafe_code
        self._managers: dict[Path | None, TaskManager] = {}

    def load(self, task: SuiteTask) -> dict[str, Any]:
        """Return the `task_dict` for the harness' `evaluate`, with its data loaded.

        Raises:
            UserError: The task is unknown, or its data or the user's files for it cannot be used.
            NotAskedError: Its files name Python code that the user has not allowed.
        """
        with self._own_code_only(task.name):
            try:
                return self._load(task)
            except UserError:
                raise
            except Exception as error:
                if self._include_path is None:
                    raise
                raise UserError(
                    f"{task.name}: its task file, or the data it names, cannot be used "
                    f"({type(error).__name__}: {error}); check {self._include_path}"
                ) from error

    @contextmanager
    def _own_code_only(self, name: str) -> Iterator[None]:
        """Without consent, refuse code that a file outside the harness names by `!function`."""
        from lm_eval.tasks import _yaml_loader as loader

        own, home = loader._import_func_in_yml, self._home.resolve()

        def guarded(function: str, folder: Path) -> Any:
            if self._consent or folder.resolve().is_relative_to(home):
                return own(function, folder)
            raise NotAskedError(
                f"{name}: a file in {folder} runs Python of its own (!function {function}); to "
                "allow that, pass --confirm-run-unsafe-code"
            )

        with patch.object(loader, "_import_func_in_yml", guarded):
            yield

    def _load(self, task: SuiteTask) -> dict[str, Any]:
        if task.name in OFFLINE_TASKS:
            loaded = self._manager(None).load([offline_config(task.name)])
        else:
            manager = self.find(task.name)
            with one_line_without_data(f"task {task.name}"):
                loaded = manager.load([task.name])
        for loaded_task in loaded["tasks"].values():
            own = loaded_task.get_config("num_fewshot")
            if task.num_fewshot is not None and own != 0:
                loaded_task.set_config(key="num_fewshot", value=task.num_fewshot)
            elif task.num_fewshot:
                logger.warning(
                    f"{task.name}: its file has num_fewshot=0, so {task.num_fewshot} examples "
                    "are not shown"
                )
            elif own is None:
                loaded_task.set_config(key="num_fewshot", value=0)
            loaded_task.set_fewshot_seed(seed=1234)  # the harness' own default
        return dict(loaded)

    def find(self, name: str) -> "TaskManager":
        """Return a manager that knows the task; raise `UserError` if no task has the name."""
        for folder in (None, self._home):
            manager = self._manager(folder)
            if name in manager.all_tasks:
                return manager
        known = [*manager.all_tasks, *suite_names(), *OFFLINE_TASKS]
        raise UserError(f"task {name!r} is unknown{nearest(name, known)}")

    def _manager(self, folder: Path | None) -> "TaskManager":
        if folder not in self._managers:
            from lm_eval.tasks import TaskManager

            paths = [path for path in (folder, self._include_path) if path is not None]
            self._managers[folder] = TaskManager(include_defaults=False, include_path=[*paths])
        return self._managers[folder]


def run_task(
    lm: LoopLM,
    loaded: Mapping[str, Any],
    *,
    limit: int | None = None,
    confirm_run_unsafe_code: bool = False,
    chat: Mapping[str, Any] | None = None,
) -> Results:
    """Return task → reading → result of a loaded task, or of a group and its members; collective.

    One pass gives the log-likelihoods of all readings; text is generated anew for each reading. All
    ranks get all results. `chat` are the harness' own arguments for asking in conversations.
    """
    from lm_eval.evaluator import evaluate

    results: Results = {}
    for index, reading in enumerate(lm.readings):
        lm.reading = index
        lm.counts.clear()
        answer = evaluate(
            lm=lm,
            task_dict=loaded,  # pyright: ignore[reportArgumentType]
            limit=limit,
            bootstrap_iters=_BOOTSTRAPS,
            log_samples=True,
            confirm_run_unsafe_code=confirm_run_unsafe_code,
            **(chat or {}),
        )
        assert answer is not None, "every rank evaluates everything"
        for name, raw in answer.get("results", {}).items():
            metrics = {
                metric: float(value)
                for metric, value in raw.items()
                if "," in metric and isinstance(value, int | float) and math.isfinite(value)
            }
            if not metrics:  # a group that aggregates nothing
                continue
            bits = _answer_bits_per_byte(
                answer.get("samples", {}).get(name, []), loaded["tasks"].get(name)
            )
            if bits is not None:
                metrics["answer_bits_per_byte"] = bits
            result = ReadingResult(metrics=metrics, mean_steps=lm.counts.get(name, lm.count).mean)
            results.setdefault(name, {})[reading.name] = result
    if not results:
        names = ", ".join(loaded["tasks"])
        raise UserError(f"no metric of task {names} is a number; look at the model's answers")
    return results


def _answer_bits_per_byte(samples: Sequence[Mapping[str, Any]], task: Any) -> float | None:
    """Return the right answers' mean bits per byte; None unless the task is multiple-choice."""
    if getattr(task, "OUTPUT_TYPE", None) != "multiple_choice":
        return None
    bits = []
    for sample in samples:
        # As the harness finds the right answer: an index, or the text of a choice.
        right = task.doc_to_text(sample["doc"]) if task.multiple_input else sample["target"]
        choices = task.doc_to_choice(sample["doc"])
        if isinstance(right, str):
            right = choices.index(right) if right in choices else -1
        if not isinstance(right, int) or not 0 <= right < len(choices):
            return None
        likelihood = sample["filtered_resps"][right][0]
        size = len(sample["arguments"][right][1].encode())  # with the space in front of it
        if size:
            bits.append(-likelihood / (math.log(2) * size))
    return sum(bits) / len(bits) if bits else None


_WITHOUT_HUB = ("OfflineModeIsEnabled", "LocalEntryNotFoundError", "DatasetNotFoundError")


@contextmanager
def one_line_without_data(reader: str) -> Iterator[None]:
    """Raise `UserError` where the hub cannot be reached, or a file is missing, inside the block.

    `reader` begins the message.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # every data library raises its own type without a network
        cause: BaseException | None = error
        while cause is not None:
            absent = isinstance(cause, FileNotFoundError) and "://" in str(cause)  # an address
            if absent or isinstance(cause, ConnectionError) or type(cause).__name__ in _WITHOUT_HUB:
                raise UserError(
                    f"{reader} reads its data from the Hugging Face hub, which cannot be reached, "
                    "and the local cache does not have it; run it once where there is a network, "
                    "or use titan-loop eval's suite 'offline'"
                ) from error
            cause = cause.__cause__ or cause.__context__
        if isinstance(error, FileNotFoundError):
            raise UserError(f"{reader} names a file that does not exist ({error})") from error
        raise
