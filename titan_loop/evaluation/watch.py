"""Evaluates every checkpoint of a run once, while the run goes on or afterwards.

    committed checkpoints − entries of evals.jsonl ─► claim ─► evaluate_tasks ─► evals.jsonl

- A checkpoint is known by its manifest's hash, so one that a restarted run wrote again is new.
- `evals.jsonl` gets its line after the evaluation. A killed watcher repeats at most the checkpoint
  it was at.
- The keep policy may delete a checkpoint at any time, the oldest first, so the oldest is evaluated
  first. One that disappears before it is read is skipped.
- Several watchers (a SLURM array) share the work: each claims a checkpoint with a file lock that
  ends with its process.
"""

import fcntl
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from titan_loop.checkpoint.folders import is_committed
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.errors import UserError
from titan_loop.evaluation.evals_log import EVALS_FIELDS, append_evaluation, lock_file
from titan_loop.evaluation.evaluate_tasks import evaluate_tasks
from titan_loop.evaluation.share_work import join_ranks
from titan_loop.evaluation.task_options import TaskOptions
from titan_loop.ranks import all_ranks, from_rank_zero
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.storage.json_files import json_sha256, read_jsonl

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _Waiting(NamedTuple):
    step: int
    manifest_sha256: str


class Watcher:
    """Evaluates new checkpoints of one run."""

    def __init__(self, run: Path, options: TaskOptions) -> None:
        options.check()
        self._run = RunDirectory(run)
        self._options = options
        self._asked = _digest_of(options)
        self._given_up: list[_Waiting] = []
        self._claim: IO[str] | None = None

    @property
    def incomplete(self) -> list[int]:
        """Steps where a task has no result, or that could not be evaluated at all."""
        return [waiting.step for waiting in self._given_up]

    def run(self, *, once: bool = False, interval_seconds: float = 60.0) -> int:
        """Evaluate until the run is complete and nothing waits; return the number of evaluations.

        With `once`, evaluate only until nothing waits; the run must already exist.
        """
        if not interval_seconds > 0:
            raise UserError(f"interval={interval_seconds} must be a positive number of seconds")
        if once and self._agreed(lambda: not self._run.run_json.exists()):
            self._run.read_run()
        evaluated = 0
        while True:
            if (chosen := self._agreed(self._choose)) is not None:
                evaluated += self._evaluate(chosen)
            elif once or self._agreed(self._is_complete):
                break
            else:
                time.sleep(interval_seconds)
        logger.info("%s: nothing left to evaluate (%d now)", self._run.path, evaluated)
        return evaluated

    def _agreed(self, look: Callable[[], T]) -> T:
        join_ranks()
        return from_rank_zero(all_ranks(), look)

    def _choose(self) -> _Waiting | None:
        """Claim the oldest waiting checkpoint that no other watcher has claimed; on rank 0."""
        done = self._done()
        for waiting in self._committed():
            if waiting in self._given_up or waiting.manifest_sha256 in done:
                continue
            if self._try_claim(waiting):
                if waiting.manifest_sha256 not in self._done():  # read anew under the claim
                    return waiting
                self._release()
        return None

    def _evaluate(self, waiting: _Waiting) -> bool:
        checkpoint = self._run.checkpoint(waiting.step)
        began = time.perf_counter()
        try:
            report = evaluate_tasks(checkpoint, self._options)
            if report.manifest_sha256 != waiting.manifest_sha256:
                logger.info("%s was replaced while it was waiting; next time", checkpoint)
                return False
            seconds = time.perf_counter() - began
            if join_ranks()[0] == 0:
                append_evaluation(self._run, report, asked=self._asked, seconds=seconds)
                results = report.summary() or "no results"
                logger.info("step %d: evaluated in %.1f s: %s", report.step, seconds, results)
            if report.failures:
                self._given_up.append(waiting)
            return True
        except (UserError, OSError) as error:
            if self._agreed(lambda: waiting in self._committed()):
                logger.error("%s cannot be evaluated: %s", checkpoint, error)
                self._given_up.append(waiting)
            else:
                logger.info("%s was deleted before it could be read", checkpoint)
            return False
        finally:
            self._release()

    def _committed(self) -> list[_Waiting]:
        """Return the checkpoints that can be read, by step; a damaged one is logged."""
        found: list[_Waiting] = []
        if not self._run.config_json.exists():
            return found  # the run has not begun
        for step in SavedRun(self._run.path).steps():
            checkpoint = self._run.checkpoint(step)
            try:
                found.append(_Waiting(step, read_manifest(checkpoint)["sha256"]))
            except UserError as error:
                if is_committed(checkpoint):
                    logger.warning("%s is passed over: %s", checkpoint, error)
        return found

    def _done(self) -> set[str]:
        return {
            str(record.get("manifest_sha256"))
            for record in read_jsonl(self._run.evals_jsonl, EVALS_FIELDS)
            if record["asked"] == self._asked
        }

    def _is_complete(self) -> bool:
        """Whether the newest checkpoint is the run's last: by its tokens, or by its step limit."""
        committed = self._committed()
        if not committed:
            return False
        try:
            state = read_manifest(self._run.checkpoint(committed[-1].step))["trainer"]
        except UserError:
            return False  # it was deleted meanwhile
        run = SavedRun(self._run.path)
        return state["tokens"] >= run.total_tokens or 0 < run.step_limit <= state["step"]

    def _try_claim(self, waiting: _Waiting) -> bool:
        file = lock_file(self._run, f"step-{waiting.step}")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return False
        self._claim = file
        return True

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.close()
            self._claim = None


def _digest_of(options: TaskOptions) -> str:
    """Return the hash that marks a line of `evals.jsonl`."""
    asked = asdict(options) | {
        "tasks": [asdict(task) for task in options.suite_tasks()],
        "depths": options.static_depths(),
    }
    return json_sha256({name: str(value) for name, value in asked.items()})[:32]
