"""Tasks, depths and settings of an evaluation: the flags that `eval` and `eval watch` share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import UseAppendAction

from titan_loop.errors import UserError, require_at_least

if TYPE_CHECKING:  # this imports numpy, which `--help` does without
    from titan_loop.evaluation.suites import SuiteTask

_TEXT_STEPS = tuple(range(1, 7))
"""R at which held-out text is scored if neither tasks nor readings are named."""

_DEPTH_SUITE_STEPS = tuple(range(1, 9))
"""R of the suite `depth` by default; beyond the trained R it extrapolates."""


_OF_HARNESS = ("num_fewshot", "apply_chat_template", "kv_cache", "prefill_steps")
"""Options that held-out text does not read."""
_OF_TEXT = ("windows", "sources", "seq_len")
"""Options that only held-out text reads, and the sample of a frontier."""


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Depths, tasks and settings of an evaluation.

    Attributes:
        depths: Recurrent steps to score, all in one pass; by default 1 to 6 without tasks.
        windows: Held-out windows per source, always the same ones.
        sources: Names of the run's sources, or folders of others; by default all of the run's.
        seq_len: Tokens of a held-out window; by default as in training.
        tasks: Tasks of lm-evaluation-harness, or suites (ouro_base, depth, offline), separated by
            commas.
        num_fewshot: Number of examples, instead of each task's own.
        limit: Documents per task, for a first look.
        apply_chat_template: Ask the harness' tasks in conversations, in the model's own template.
        system_instruction: System turn of these conversations.
        fewshot_as_multiturn: Make a turn of each example's question and answer.
        recurrent_steps: Number of recurrent steps R; by default the trained one.
        exit: Exit policy, such as full, static:2, q:0.9 or kl:0.01,3; the README of
            titan_loop/inference lists them.
        kv_cache: Key-value cache of generated tokens: full, last, first, averaged, or
            the family's own.
        prefill_steps: Number of recurrent steps of prompts; by default as for generated tokens.
        batch_size: Number of rows that a task of the harness runs at a time.
        max_length: Context in tokens; by default the trained window.
        dtype: Type of the weights.
        tokenizer: A tokenizer.json; by default the source's.
        include_path: Folder of your own harness tasks.
        confirm_run_unsafe_code: Run, without a sandbox, the programs that the model writes in code
            tasks.
    """

    depths: tuple[int, ...] = ()
    windows: int = 64
    sources: tuple[str, ...] = ()
    seq_len: int | None = None
    tasks: UseAppendAction[tuple[str, ...]] = ()
    num_fewshot: int | None = None
    limit: int | None = None
    apply_chat_template: bool = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool = False
    recurrent_steps: int | None = None
    exit: str = "full"
    kv_cache: str = "full"
    prefill_steps: int | None = None
    batch_size: int = 8
    max_length: int | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    tokenizer: str | None = None
    include_path: Path | None = None
    confirm_run_unsafe_code: bool = False

    @property
    def _names(self) -> list[str]:
        words = (word.strip() for text in self.tasks or ("held_out",) for word in text.split(","))
        return [word for word in words if word]

    def suite_tasks(self) -> "list[SuiteTask]":
        """Return the tasks to ask; held-out text if none is named."""
        from titan_loop.evaluation.suites import expand_tasks

        return expand_tasks(self._names, self.num_fewshot)

    def chat_arguments(self) -> dict[str, Any]:
        """Return the harness' arguments for asking in conversations; none without them."""
        if not self.apply_chat_template:
            return {}
        names = ("apply_chat_template", "system_instruction", "fewshot_as_multiturn")
        return {name: getattr(self, name) for name in names}

    def static_depths(self) -> Sequence[int]:
        """Return the depths to read at; empty to read at R, or by the exit policy."""
        if self.depths or self.exit != "full" or self.recurrent_steps is not None:
            return self.depths
        if not self.tasks:
            return _TEXT_STEPS
        return _DEPTH_SUITE_STEPS if "depth" in self._names else ()

    def check(self, *, frontier: bool = False) -> None:
        """Raise `UserError` for values that cannot work, before anything is loaded."""
        # These import torch, which takes seconds.
        from titan_loop.evaluation.offline_tasks import HELD_OUT
        from titan_loop.evaluation.readings import depth_readings, policy_reading
        from titan_loop.inference.cache import cache_strategy
        from titan_loop.text.tokenizer import load_tokenizer

        if self.depths:
            depth_readings(self.depths)
        policy_reading(self.exit, self.recurrent_steps or 10**6)  # the trained R is not known yet
        require_at_least(1, limit=self.limit, windows=self.windows, batch_size=self.batch_size)
        require_at_least(1, recurrent_steps=self.recurrent_steps, prefill_steps=self.prefill_steps)
        require_at_least(2, seq_len=self.seq_len, max_length=self.max_length)
        cache_strategy(self.kv_cache)
        if self.tokenizer is not None:
            load_tokenizer(self.tokenizer)
        chats = self.system_instruction or self.fewshot_as_multiturn
        if chats and not self.apply_chat_template:
            raise UserError(
                "system_instruction and fewshot_as_multiturn have no effect without "
                "apply_chat_template; add it"
            )
        if self.depths and frontier:
            raise UserError("depths and frontier exclude each other: a frontier has every depth")
        if (self.depths or frontier) and self.exit != "full":
            raise UserError(
                f"exit={self.exit} has no effect with depths or frontier, which set the readings"
            )
        if self.depths and self.recurrent_steps is not None:
            raise UserError(
                f"recurrent_steps={self.recurrent_steps} has no effect with "
                f"depths={list(self.depths)}; leave one of them out"
            )
        asked = {task.name for task in self.suite_tasks()}
        if asked == {HELD_OUT}:
            self._require_unset(("limit", *_OF_HARNESS), "on held-out text", "name other tasks")
        elif HELD_OUT not in asked and not frontier:
            self._require_unset(_OF_TEXT, "without held-out text", f"add {HELD_OUT} to tasks")
        if self.include_path is not None and not self.include_path.is_dir():
            raise UserError(f"include_path={self.include_path} is not a folder")

    def check_own_task(self, own: str) -> None:
        """Refuse options of other tasks if only the run's own task, and text, are asked."""
        from titan_loop.evaluation.offline_tasks import HELD_OUT

        if {task.name for task in self.suite_tasks()} <= {own, HELD_OUT}:
            self._require_unset(_OF_HARNESS, f"on {own}, the run's own task", "name other tasks")

    def _require_unset(self, names: Sequence[str], where: str, fix: str) -> None:
        for name in names:
            if (value := getattr(self, name)) != getattr(TaskOptions, name):
                raise UserError(f"{name}={value} has no effect {where}; leave it out, or {fix}")
