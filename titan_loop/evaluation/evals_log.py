"""`evals.jsonl` of a run: one line per evaluation, by the trainer or a watcher.

- `step`, `tokens`: number of steps and tokens that the model was trained for.
- `manifest_sha256`: hash of its manifest; null for a model in training, which is not saved yet.
- `asked`: hash of a watcher's tasks and options, "while training", or "promotion" (curriculum).
- `finished`, `seconds`: end and duration of the evaluation.
- `failures`: task → reason for having no result.
- `results`: task/metric/reading → value, named as in `TaskReport.flat`.
"""

import fcntl
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

from titan_loop.evaluation.offline_tasks import HELD_OUT
from titan_loop.evaluation.task_report import TaskReport
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import append_jsonl, read_jsonl
from titan_loop.storage.kept_records import append_or_keep

LOCKS = "claims"
WHILE_TRAINING = "while training"
PROMOTION = "promotion"
_PREFIX = f"{HELD_OUT}/"

EVALS_FIELDS = {"step": int, "tokens": int, "asked": str, "results": dict}
"""Fields of every line that readers rely on, with their types."""


def append_evaluation(run: RunDirectory, report: TaskReport, *, asked: str, seconds: float) -> None:
    """Append one evaluation; wait while another process writes a line."""
    record = {
        "step": report.step,
        "tokens": report.tokens,
        "manifest_sha256": report.manifest_sha256 or None,
        "asked": asked,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 2),
        "failures": report.failures,
        "results": report.flat(),
    }

    def append(path: Path, record: Mapping[str, Any]) -> None:
        with lock_file(run, path.name) as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            append_jsonl(path, record)

    # A failing disk must not stop training; a watcher must know that its line was written.
    if asked in (WHILE_TRAINING, PROMOTION):
        append_or_keep(run.evals_jsonl, record, append)
    else:
        append(run.evals_jsonl, record)


class HeldOutRecord(NamedTuple):
    """Tokens read before an evaluation while training, and source → R → bits per byte."""

    tokens: int
    bits_per_byte: dict[str, dict[int, float]]


def held_out_while_training(run: RunDirectory) -> list[HeldOutRecord]:
    """Return evaluations of held-out text while training, by step; the newest if repeated."""
    by_step: dict[int, HeldOutRecord] = {}
    for record in read_jsonl(run.evals_jsonl, EVALS_FIELDS):
        if record["asked"] != WHILE_TRAINING:
            continue
        for name, value in record["results"].items():
            task, metric, reading = name.rsplit("/", 2)
            if value is None:  # it was not finite
                continue
            if metric == "bits_per_byte" and task.startswith(_PREFIX):
                at = by_step.setdefault(record["step"], HeldOutRecord(record["tokens"], {}))
                depth = int(reading.removeprefix("static:"))
                at.bits_per_byte.setdefault(task.removeprefix(_PREFIX), {})[depth] = value
    return [by_step[step] for step in sorted(by_step)]


def lock_file(run: RunDirectory, name: str) -> IO[str]:
    """Open a file to be locked; closing it, or the end of the process, frees the lock."""
    folder = run.evaluations / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"{name}.lock").open("a+", encoding="utf-8")
