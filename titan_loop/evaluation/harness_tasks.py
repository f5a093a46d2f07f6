"""Loads tasks of lm-evaluation-harness and runs them under every reading."""

import math
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from urllib.parse import urlsplit

from titan_loop.errors import UserError, nearest
from titan_loop.evaluation.harness_model import LoopLM, StepCount
from titan_loop.evaluation.offline_tasks import OFFLINE_TASKS, offline_config
from titan_loop.evaluation.suites import NotAskedError, SuiteTask, suite_names
from titan_loop.evaluation.task_report import ReadingResult, Results

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

_PROBE_SECONDS = 3.0
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
            with hub_offline_if_unreachable(f"task {task.name}"):
                loaded = manager.load([task.name])
        for loaded_task in loaded["tasks"].values():
            own = loaded_task.get_config("num_fewshot")
            if task.num_fewshot is not None and own != 0:
                loaded_task.set_config(key="num_fewshot", value=task.num_fewshot)
            elif own is None:
                loaded_task.set_config(key="num_fewshot", value=0)
            loaded_task.set_fewshot_seed(seed=1234)  # the harness' own default
        return dict(loaded)

    def find(self, name: str) -> "TaskManager":
        """Return a manager that knows the task; raise `UserError` if no task has the name."""
        for folder in (None, self._likely_folder(name), self._home):
            manager = self._manager(folder)
            if name in manager.all_tasks:
                return manager
        known = [*self._manager(self._home).all_tasks, *suite_names(), *OFFLINE_TASKS]
        raise UserError(f"task {name!r} is unknown{nearest(name, known)}")

    def _likely_folder(self, name: str) -> Path | None:
        """Return the harness' folder with the longest name that begins the task's name."""
        words = name.rstrip("0123456789").split("_")  # minerva_math500 is in minerva_math
        beginnings = ("_".join(words[:count]) for count in range(len(words), 0, -1))
        return next((self._home / b for b in beginnings if (self._home / b).is_dir()), None)

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
        lm.reading, lm.count = index, StepCount()
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
            bits = _answer_bits_per_byte(
                answer.get("samples", {}).get(name, []), loaded["tasks"].get(name)
            )
            if bits is not None:
                metrics["answer_bits_per_byte"] = bits
            result = ReadingResult(metrics=metrics, mean_steps=lm.count.mean)
            results.setdefault(name, {})[reading.name] = result
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


@contextmanager
def hub_offline_if_unreachable(reader: str) -> Iterator[None]:
    """Let the hub's clients use only their caches inside the block if there is no network.

    Raises:
        UserError: Neither the hub nor the cache has the data; `reader` begins the message.
    """
    from datasets import config
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and _hub_is_reachable():
        yield
        return
    try:
        with (
            patch.object(constants, "HF_HUB_OFFLINE", True),
            patch.object(config, "HF_HUB_OFFLINE", True),
        ):
            yield
    except Exception as error:  # every data library raises its own type without a network
        if isinstance(error, UserError):
            raise
        if not _is_about_the_network(error):
            if isinstance(error, FileNotFoundError):
                raise UserError(f"{reader} names a file that does not exist ({error})") from error
            raise
        raise UserError(
            f"{reader} reads its data from the Hugging Face hub, which cannot be reached, and the "
            "local cache does not have it; run it once where there is a network, or use titan-loop "
            "eval's suite 'offline'"
        ) from error


def _hub_is_reachable() -> bool:
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return True  # only a real request could tell
    parts = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    address = (parts.hostname or "", parts.port or 443)
    try:
        socket.create_connection(address, timeout=_PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def _is_about_the_network(error: BaseException | None) -> bool:
    names = {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "DatasetNotFoundError"}
    while error is not None:
        if isinstance(error, ConnectionError) or type(error).__name__ in names:
            return True
        if isinstance(error, FileNotFoundError) and "://" in str(error):
            return True  # an address, not a file of this machine
        error = error.__cause__ or error.__context__
    return False
