"""The generated tasks by name, and the task that a checkpoint was trained on."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from titan_loop.data.tasks.capo import Capo
from titan_loop.data.tasks.dag_arithmetic import DagArithmetic, DagChainOfThought
from titan_loop.data.tasks.depo import Depo
from titan_loop.data.tasks.layered_qa import LayeredQA
from titan_loop.data.tasks.mano import Mano
from titan_loop.data.tasks.mano_capo import ManoCapo
from titan_loop.data.tasks.mqar import MQAR
from titan_loop.data.tasks.permutation_hops import PermutationHops
from titan_loop.data.tasks.reachability import Reachability
from titan_loop.data.tasks.task import Task
from titan_loop.data.tasks.two_graph import TwoGraph
from titan_loop.data.tasks.two_hop_systematic import TwoHopSystematic
from titan_loop.errors import UserError
from titan_loop.plugins import import_plugins

TASK = "task"
"""Field of a loader's description that names the task; its parameters stand beside it."""

_OWN = (
    Capo,
    DagArithmetic,
    DagChainOfThought,
    Depo,
    LayeredQA,
    MQAR,
    Mano,
    ManoCapo,
    PermutationHops,
    Reachability,
    TwoGraph,
    TwoHopSystematic,
)

TASKS: dict[str, type[Task]] = {kind.name: kind for kind in _OWN}


def register(kind: type[Task]) -> None:
    """Make a task of yours known by its name; readers of its checkpoints need it, too."""
    assert TASKS.setdefault(kind.name, kind) is kind, f"two tasks are called {kind.name}"


def find_task(name: str) -> type[Task]:
    """Return the task that a run recorded by its name.

    Raises:
        UserError: This version does not know it, and no plug-in registers it.
    """
    if name not in TASKS:
        import_plugins()
    if name not in TASKS:
        raise UserError(
            f"the run was trained on the task {name!r}, which this version does not know: use the "
            "version of titan_loop that trained it, or name the task's module in "
            "TITAN_LOOP_PLUGINS"
        )
    return TASKS[name]


def recorded_task(loader_state: Mapping[str, Any]) -> Task | None:
    """Return the task that a run was reading when it saved a checkpoint; None for text.

    Args:
        loader_state: The loader's `state_dict`, which is a manifest's `data`; empty for an imported
            model.

    Raises:
        UserError: For a task that this version does not know.
    """
    data = loader_state.get("data", {})
    name = data.get(TASK)
    if name is None:
        return None
    return _of_record(find_task(name), data)


def _of_record(kind: type, record: Mapping[str, Any]) -> Any:
    """Return a task, or a part of one, from its recorded parameters."""
    hints = get_type_hints(kind)

    def value(name: str) -> Any:
        is_part = is_dataclass(hints[name])
        return _of_record(hints[name], record[name]) if is_part else record[name]

    return kind(**{field.name: value(field.name) for field in fields(kind) if field.name in record})
