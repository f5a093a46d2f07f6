"""A run on a generated task, opened for an analysis, and the file that the analysis leaves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_loop.data.tasks.registry import recorded_task
from titan_loop.data.tasks.task import Task
from titan_loop.errors import UserError, nearest
from titan_loop.inference.loading import Loaded, load_checkpoint
from titan_loop.models.family import Use
from titan_loop.storage.json_files import write_json


def open_task(
    run: Path,
    strata: Sequence[str],
    questions: int,
    *,
    least: int = 1,
    use: Use = "analyse",
) -> tuple[Loaded, Task, list[str]]:
    """Return a run on a generated task, the task, and the names of its strata to ask.

    Args:
        run: Run, or one of its checkpoints.
        strata: Names; none for all.
        questions: Number of questions asked for.
        least: Smallest number that is allowed.
        use: What the run's family must be for.

    Raises:
        UserError: Too few questions, no such stratum, or a run on text.
    """
    if questions < least:
        raise UserError(f"questions={questions} must be at least {least}")
    loaded = load_checkpoint(run, use=use)
    task = recorded_task(loaded.manifest["data"])
    if task is None:
        raise UserError(f"{run} was trained on text; this analysis asks a generated task's exam")
    for name in strata:
        if name not in task.strata:
            raise UserError(f"strata={name}: {task.name} has none{nearest(name, task.strata)}")
    return loaded, task, [*(strata or task.strata)]


def save_analysis(loaded: Loaded, name: str, record: dict[str, Any]) -> Path:
    """Write evals/NAME-step-N.json of the run, and return its path."""
    folder = loaded.run.directory.evaluations
    folder.mkdir(parents=True, exist_ok=True)
    step = loaded.manifest["step"]
    path = folder / f"{name}-step-{step}.json"
    write_json(path, {"manifest_sha256": loaded.manifest["sha256"], "step": step, **record})
    return path
