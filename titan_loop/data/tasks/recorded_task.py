"""The task that a checkpoint was trained on, by the name that it recorded."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from titan_loop.data.tasks.task import Task
from titan_loop.errors import UserError
from titan_loop.plugins import find

TASK = "task"
"""Field of a loader's description that names the task; its parameters stand beside it."""


def find_task(name: str) -> type[Task]:
    """Return the task that a run recorded by its name; raise `UserError` if it is unknown."""
    task = find("tasks", name)
    if task is None:
        raise UserError(
            f"the run was trained on the task {name!r}, which this version does not know: use the "
            "version that trained it, or name the task's module in TITAN_LOOP_PLUGINS"
        )
    assert task.name == name, f"task {name} calls itself {task.name}"
    return task


def recorded_task(loader_state: Mapping[str, Any]) -> Task | None:
    """Return the task in a loader's `state_dict`, as in a manifest's `data`; None for text."""
    data = loader_state.get("data", {})
    return _of_record(find_task(data[TASK]), data) if TASK in data else None


def _of_record(kind: type, record: Mapping[str, Any]) -> Any:
    hints = get_type_hints(kind)

    def value(name: str) -> Any:
        is_part = is_dataclass(hints[name])
        return _of_record(hints[name], record[name]) if is_part else record[name]

    return kind(**{field.name: value(field.name) for field in fields(kind) if field.name in record})
