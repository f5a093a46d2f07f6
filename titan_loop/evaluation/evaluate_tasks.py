"""Evaluates one checkpoint on tasks, under every reading; a failed task costs only its own result.

A task is held-out text, an exam on token ids, or a task of the harness.
"""

import logging
import os
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from titan_loop.data.labels import IGNORED
from titan_loop.data.load.held_out_windows import HeldOutWindows
from titan_loop.data.load.mixture_sources import named_sources
from titan_loop.data.tasks.recorded_task import recorded_task
from titan_loop.errors import UserError
from titan_loop.evaluation.exam import Exam, model_sizes
from titan_loop.evaluation.ngram_baselines import baseline_bits, count_what_was_read
from titan_loop.evaluation.offline_tasks import HELD_OUT
from titan_loop.evaluation.readings import (
    Reading,
    depth_readings,
    frontier_readings,
    policy_reading,
)
from titan_loop.evaluation.share_work import join_ranks, rank_device
from titan_loop.evaluation.suites import CODE_TASKS, NotAskedError, SuiteTask
from titan_loop.evaluation.task_options import TaskOptions
from titan_loop.evaluation.task_report import ReadingResult, Results, TaskReport
from titan_loop.evaluation.window_scores import (
    Forward,
    at_depths,
    at_readings,
    name_of_total,
    open_run,
    score_windows,
    sum_windows,
    summarise,
    with_total,
)
from titan_loop.inference.engine import require_prefill_steps
from titan_loop.inference.exit_policy import StaticStep, require_exit_policy
from titan_loop.inference.loading import Loaded, load_checkpoint, load_matching_tokenizer
from titan_loop.models.family import get_family
from titan_loop.runs.saved_run import SavedRun

if TYPE_CHECKING:
    from titan_loop.evaluation.harness_model import LoopLM
    from titan_loop.evaluation.harness_tasks import HarnessTasks

logger = logging.getLogger(__name__)

_EXAM_QUESTIONS = 512
_SAMPLE_WINDOWS = 4
_SAMPLE_QUESTIONS = 64


def evaluate_tasks(
    checkpoint: str | Path,
    options: TaskOptions,
    *,
    frontier: bool = False,
    baselines: bool = False,
    ema: bool = False,
) -> TaskReport:
    """Evaluate a checkpoint; collective.

    Rank 0 also writes the report, after each task, into the run's `evals/`. The report records the
    failures of single tasks; mistakes in the options raise `UserError`, and so does held-out text
    that cannot be scored if no task is named.

    Args:
        frontier: Whether to read every depth, and every exit policy at many settings.
        baselines: Whether to score held-out text with n-gram models of the text the model read.
    """
    options.check(frontier=frontier)
    join_ranks()
    context = options.max_length
    if options.seq_len is not None:
        context = max(options.seq_len, context or SavedRun.open(checkpoint).seq_len)
    loaded = load_checkpoint(
        checkpoint,
        context_tokens=context,
        device=rank_device(),
        dtype=getattr(torch, options.dtype),
        ema=ema,
    )
    if options.tokenizer is not None:
        load_matching_tokenizer(loaded, options.tokenizer)  # fails before the first task
    return _Evaluation(loaded, options, frontier=frontier, baselines=baselines).run()


class _Evaluation:
    """One call of `evaluate_tasks`; expensive parts are built once, when first needed."""

    def __init__(
        self, loaded: Loaded, options: TaskOptions, *, frontier: bool, baselines: bool
    ) -> None:
        self._loaded = loaded
        self._options = options
        self._run = loaded.run.directory
        self._model = loaded.model
        self._device = loaded.model.tok_embeddings.weight.device
        self._baselines = baselines
        manifest = loaded.manifest
        self._generated = recorded_task(manifest["data"])
        if self._generated is not None:
            options.check_own_task(self._generated.name)
        self._report = TaskReport(
            step=manifest["step"],
            tokens=manifest["trainer"]["tokens"],
            trained_recurrent_steps=loaded.recurrent_steps,
            manifest_sha256=manifest["sha256"],
            kv_cache=options.kv_cache,
            ema=loaded.ema,
        )
        self._harness: HarnessTasks | None = None
        self._lm: LoopLM | None = None
        self._shots: dict[str, str] = {}
        self._readings = self._make_readings(frontier=frontier)
        for reading in self._readings:
            require_prefill_steps(options.prefill_steps, reading.deepest_step)

    def run(self) -> TaskReport:
        for task in self._options.suite_tasks():
            before = {*self._report.tasks}
            try:
                found = self._ask(task)
                for name, results in found.items():
                    for result in results.values():
                        result.settings = self._settings(task)
                    self._report.tasks[name] = results
                logger.info("%s: done", task.name)
            except UserError as error:
                if not self._options.tasks:
                    raise
                skips = isinstance(error, NotAskedError) and task.optional
                kept = self._report.skipped if skips else self._report.failures
                kept[task.name] = str(error)
                logger.warning("%s has no result: %s", task.name, error)
            except Exception as error:  # whatever it is, the other tasks' results are worth keeping
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
                self._report.failures[task.name] = reason
                logger.exception("%s failed: %s", task.name, reason)
            if join_ranks()[0] == 0:
                new = {n: r for n, r in self._report.tasks.items() if n not in before}
                replace(self._report, tasks=new).save(self._run)
        return self._report

    def _settings(self, task: SuiteTask) -> str:
        options = self._options
        shots = self._shots.get(task.name, "own")
        length = "" if options.seq_len is None else f"seq_len={options.seq_len} "
        if options.prefill_steps is not None:
            length += f"prefill_steps={options.prefill_steps} "
        if options.apply_chat_template and task.name in self._shots:
            length += "chat "
            if options.system_instruction is not None:
                length += f"system={sha256(options.system_instruction.encode()).hexdigest()[:8]} "
            if options.fewshot_as_multiturn:
                length += "multiturn "
        own = named_sources([str(path) for path in self._loaded.run.sources])
        given = {os.path.realpath(own.get(name, name)) for name in options.sources}
        if task.name == HELD_OUT and (other := given - {*map(os.path.realpath, own.values())}):
            length += f"sources={','.join(sorted(other))} "
        # Only held-out text has windows, and only the others have documents.
        windows, limit = None, options.limit
        if task.name == HELD_OUT:
            windows, limit = options.windows, None
        return (
            f"{length}windows={windows} limit={limit} num_fewshot={shots} "
            f"context={self._loaded.model.config.max_seq_len} dtype={options.dtype}"
        )

    def _ask(self, task: SuiteTask) -> Results:
        names = [reading.name for reading in self._readings]
        if task.name == HELD_OUT:
            return self._score_text(names)
        if self._generated is not None and self._generated.name == task.name:
            right = at_readings(self._model, self._readings, value="right_PT")
            return self._exam.grade(
                names,
                lambda windows: sum_windows(windows, right, device=self._device),
                lambda windows: sum_windows(windows, self._nats(), device=self._device),
                model_sizes(self._model),
            )
        return self._ask_harness(task)

    def _score_text(self, names: list[str]) -> Results:
        get_family(self._model.config.family).require("held_out")
        held_out, nats = self._windows, self._nats()
        scores = with_total(
            {
                name: score_windows(part, nats, device=self._device)
                for name, part in held_out.items()
            }
        )
        results = {f"{HELD_OUT}/{name}": summarise(part, names) for name, part in scores.items()}
        if self._baselines and self._loaded.run.mixture:  # otherwise, it has read no text
            counts = count_what_was_read(
                self._loaded.run, self._loaded.manifest["data"], self._model.config.vocab_size
            )
            found = baseline_bits(counts, held_out, name_of_total(held_out))
            for name in scores:
                results[f"{HELD_OUT}/{name}"] |= {
                    baseline: ReadingResult(metrics={"bits_per_byte": value})
                    for baseline, value in found[name].items()
                }
        return results

    def _nats(self) -> Forward:
        if all(isinstance(reading.policy, StaticStep) for reading in self._readings):
            return at_depths(self._model, [each.deepest_step for each in self._readings])
        return at_readings(self._model, self._readings)

    def _ask_harness(self, task: SuiteTask) -> Results:
        consent = self._options.confirm_run_unsafe_code
        if task.name in CODE_TASKS and not consent:
            raise NotAskedError(
                f"{task.name}: it runs the programs that the model writes; to allow that, pass "
                "--confirm-run-unsafe-code"
            )
        try:
            from titan_loop.evaluation.harness_model import LoopLM
            from titan_loop.evaluation.harness_tasks import HarnessTasks, run_task
        except ImportError as error:
            raise UserError(
                f"task {task.name} needs lm-evaluation-harness ({error}): pip install "
                "'titan-loop[eval]'"
            ) from error
        options = self._options
        if self._harness is None:
            self._harness = HarnessTasks(options.include_path, confirm_run_unsafe_code=consent)
        if consent:
            os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # read when such a task is loaded
        loaded_task = self._harness.load(task)
        # A task's file may forbid examples, and a group's tasks may differ.
        shots = {each.get_config("num_fewshot") for each in loaded_task["tasks"].values()}
        self._shots[task.name] = ",".join(map(str, sorted(shots)))
        if self._lm is None:
            self._lm = LoopLM(
                loaded=self._loaded,
                readings=self._readings,
                kv_cache=options.kv_cache,
                prefill_steps=options.prefill_steps,
                batch_size=options.batch_size,
                tokenizer=options.tokenizer,
            )
        return run_task(
            self._lm,
            loaded_task,
            limit=options.limit,
            confirm_run_unsafe_code=consent,
            chat=options.chat_arguments(),
        )

    @cached_property
    def _windows(self) -> dict[str, HeldOutWindows]:
        options = self._options
        chosen = {"sources": options.sources, "seq_len": options.seq_len}
        return open_run(self._loaded.run, count=options.windows, **chosen)

    @cached_property
    def _exam(self) -> Exam:
        assert self._generated is not None
        return Exam(
            self._generated,
            self._options.limit or _EXAM_QUESTIONS,
            vocab_size=self._model.config.vocab_size,
            room=self._model.config.max_seq_len,
        )

    def _make_readings(self, *, frontier: bool) -> list[Reading]:
        options = self._options
        steps = options.recurrent_steps or self._loaded.recurrent_steps
        if not frontier:
            if depths := options.static_depths():
                # By default as many as the model can have.
                most = None if options.depths else self._model.config.most_steps
                return depth_readings(depths[:most])
            reading = policy_reading(options.exit, steps)
            require_exit_policy(self._model, reading.policy)
            return [reading]
        # Some thresholds are quantiles over the states of a small sample (`frontier_readings`).
        if self._generated is not None:
            sample, count = [*self._exam.windows.values()][-1], _SAMPLE_QUESTIONS
        else:
            sample, count = next(iter(self._windows.values())), _SAMPLE_WINDOWS
        sample = sample.rows(range(min(count, len(sample.labels))), self._device)
        with torch.no_grad():
            output = self._model(
                sample.input,
                sample.positions,
                recurrent_steps=steps,
                collect="all",
                columns=sample.columns_for(self._model.config.columns) or None,
            )
        states = [state_BLD[sample.labels != IGNORED] for state_BLD in output.hidden_RBLD]
        return frontier_readings(self._model, states, steps)
