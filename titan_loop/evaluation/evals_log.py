"""`evals.jsonl` of a run: one line an evaluation, whoever made it.

- `step`, `tokens`: how far the model was trained.
- `manifest_sha256`: which checkpoint it was; null for a model in training, not saved yet.
- `asked`: a hash of a watcher's questions, or "while training".
- `finished`, `seconds`: when, and how long it took.
- `failures`: task → why it has no result.
- `results`: task/metric/reading → value, named as in `TaskReport.flat`.
"""

import fcntl
from datetime import UTC, datetime
from typing import IO

from titan_loop.evaluation.task_report import TaskReport
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import append_jsonl

LOCKS = "claims"
WHILE_TRAINING = "while training"


def append_evaluation(run: RunDirectory, report: TaskReport, *, asked: str, seconds: float) -> None:
    """Append one evaluation; waits for whoever else is writing a line.

    Args:
        run: The run.
        report: What was found.
        asked: Which questions.
        seconds: How long it took.
    """
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
    with lock_file(run, run.evals_jsonl.name) as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        append_jsonl(run.evals_jsonl, record)


def lock_file(run: RunDirectory, name: str) -> IO[str]:
    """Open a file that may be locked; closing it, or the end of the process, frees the lock."""
    folder = run.evaluations / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"{name}.lock").open("a+", encoding="utf-8")
