"""Input and output of an analysis: a run, and a record with lines, tables and plots."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from titan_loop.data.tasks.recorded_task import recorded_task
from titan_loop.data.tasks.task import Task
from titan_loop.errors import UserError, nearest, require_at_least
from titan_loop.inference.loading import Loaded, load_checkpoint
from titan_loop.models.family import Use
from titan_loop.storage.json_files import write_json
from titan_loop.tables import columns

Rows = Sequence[Sequence[str]]


class Figure(NamedTuple):
    """Heading and caption of a plot, and a function that writes its PNG and returns the path."""

    title: str
    text: str
    draw: Callable[[Path], Path]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The result of one analysis of one checkpoint.

    Attributes:
        name: Verb, which names the record.
        record: JSON fields of evals/NAME-step-N.json.
        figures: File name in plots/ → figure.
        tables: Title → rows, header first; printed, and shown in the report.
        results: TASK/METRIC/READING → value, which `results add` takes.
    """

    name: str
    loaded: Loaded
    record: Mapping[str, Any]
    lines: Sequence[str] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
    tables: Mapping[str, Rows] = field(default_factory=dict)
    results: Mapping[str, float] = field(default_factory=dict)

    def text(self) -> str:
        """Return the tables and lines for the terminal."""
        blocks = ["\n".join(columns(rows)) + "\n" for rows in self.tables.values()]
        return "\n".join([*blocks, *self.lines])

    def save(self) -> list[Path]:
        """Write the record, with titles for the report, and the plots; return the paths."""
        directory, manifest = self.loaded.run.directory, self.loaded.manifest
        directory.evaluations.mkdir(parents=True, exist_ok=True)
        path = directory.evaluations / f"{self.name}-step-{manifest['step']}.json"
        shown = {
            "figures": {name: [figure.title, figure.text] for name, figure in self.figures.items()},
            "tables": dict(self.tables),
            **({"results": dict(self.results)} if self.results else {}),
        }
        record = {"manifest_sha256": manifest["sha256"], "step": manifest["step"], **self.record}
        write_json(path, {**record, **shown})
        plots = [figure.draw(directory.plots / name) for name, figure in self.figures.items()]
        return [path, *plots]


def open_task(
    run: Path, strata: Sequence[str], questions: int, *, use: Use = "analyse"
) -> tuple[Loaded, Task, list[str]]:
    """Return a run on a generated task, the task, and the names of its strata to ask."""
    require_at_least(1, questions=questions)
    loaded = load_checkpoint(run, use=use)
    task = recorded_task(loaded.manifest["data"])
    if task is None:
        raise UserError(f"{run} was trained on text; this analysis asks a generated task's exam")
    for name in strata:
        if name not in task.strata:
            raise UserError(f"strata={name}: {task.name} has none{nearest(name, task.strata)}")
    return loaded, task, [*(strata or task.strata)]


def chosen_steps(recurrent_steps: int | None, loaded: Loaded) -> int:
    """Return R as asked for, else as trained; raises `UserError` below 1."""
    require_at_least(1, recurrent_steps=recurrent_steps)
    return recurrent_steps or loaded.recurrent_steps
