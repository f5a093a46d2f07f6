"""Registration of families and their parts, ours and a user's.

    titan_loop/families/NAME/__init__.py ─┐
    train_configs/NAME/__init__.py ───────┤
    TITAN_LOOP_PLUGINS=my_package.mine ───┼─► register(Plugin(…)) ─► find("families", "mine")
    import of a module by a recipe ───────┘

A package lists its additions in a `Plugin`: names, each with the import path of its object, which
is imported on first use. Commands that only list names thus import no torch, and the core imports
no family: deleting a family is deleting its folder.

A recipe imports the modules it uses. The other commands read runs, which name a family or a task
but no module: the user decides which modules are imported, not a downloaded run.
"""

import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from titan_loop.errors import UserError, seen_from

PLUGINS = "TITAN_LOOP_PLUGINS"
FAMILIES = "titan_loop.families"
_CORE = ("titan_loop.data.tasks", "titan_loop.formats")
"""Packages of the core that register names for every family."""


class Verb(NamedTuple):
    """The place of a function that is a verb of the command line, and a line about it."""

    place: str
    summary: str


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """Names that a package adds, each with the thing itself or its place, "module:attribute".

    Attributes:
        families: `Family` records (`titan_loop/models/family.py`).
        tasks: Classes of generated tasks (`titan_loop/data/tasks/task.py`).
        objectives: Loss classes, by class name (`titan_loop/objectives/streamed_loss.py`).
        exit_policies: Exit policies of one number, by the name before the colon
            (`titan_loop/inference/exit_policy.py`).
        kv_caches: Key-value caches (`titan_loop/inference/cache.py`) of families that name them.
        analyses: Verbs of `titan-loop analyse` (`titan_loop/analysis/steps/`), each a `Verb`.
        charts: Plots of `metrics.jsonl` (`titan_loop/analysis/drawing.py`).
        suites: Tuples of `SuiteTask`s (`titan_loop/evaluation/suites.py`).
        formats: Formats of other programs (`titan_loop/formats/format.py`).
        verbs: Verbs of `titan-loop` itself (`titan_loop/cli/arguments.py`), each a `Verb`.
    """

    families: Mapping[str, Any] = field(default_factory=dict)
    tasks: Mapping[str, Any] = field(default_factory=dict)
    objectives: Mapping[str, Any] = field(default_factory=dict)
    exit_policies: Mapping[str, Any] = field(default_factory=dict)
    kv_caches: Mapping[str, Any] = field(default_factory=dict)
    analyses: Mapping[str, Verb] = field(default_factory=dict)
    charts: Mapping[str, Any] = field(default_factory=dict)
    suites: Mapping[str, Any] = field(default_factory=dict)
    formats: Mapping[str, Any] = field(default_factory=dict)
    verbs: Mapping[str, Verb] = field(default_factory=dict)


_known: dict[str, dict[str, Any]] = {kind.name: {} for kind in fields(Plugin)}


def register(plugin: Plugin) -> Plugin:
    """Make the names of a package known, and return its record."""
    for kind, known in _known.items():
        for name, place in getattr(plugin, kind).items():
            assert known.setdefault(name, place) is place or known[name] == place, (
                f"two of {kind} are called {name}"
            )
    return plugin


def find(kind: str, name: str) -> Any:
    """Return the object registered under a name; None if the name is unknown.

    `kind` is an attribute of `Plugin`. Modules of `TITAN_LOOP_PLUGINS` are imported last; raises
    `UserError` if one does not exist.
    """
    known = _known[kind]
    for import_more in (_import_own, _import_plugins):
        if name not in known:
            import_more()
    return load(known.get(name))


def load(place: Any) -> Any:
    """Return the object at a place, "module:attribute" or a `Verb`; other objects as they are."""
    if isinstance(place, Verb):
        place = place.place
    if not isinstance(place, str):
        return place
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def names(kind: str) -> list[str]:
    """Return every name of a kind, including names from `TITAN_LOOP_PLUGINS`."""
    _import_own()
    _import_plugins()
    return sorted(_known[kind])


def summary(kind: str, name: str) -> str:
    """Return the line about a registered verb."""
    return _known[kind][name].summary


def studies() -> dict[str, Path]:
    """Return package → folder of every study, `train_configs/NAME`."""
    # By this file's place, not by `sys.path`: the user's folder may hold another `train_configs`,
    # and a study that is imported under two names registers twice.
    here = Path(__file__).parent
    name, root = "titan_loop.train_configs", here / "train_configs"  # in the wheel
    if not root.is_dir():
        name, root = "train_configs", here.parent / "train_configs"  # in a checkout
        spec = importlib.util.spec_from_file_location(name, root / "__init__.py")
        if spec and root.is_dir() and name not in sys.modules:
            sys.modules[name] = importlib.util.module_from_spec(spec)
    return {
        f"{name}.{path.parent.name}": path.parent for path in sorted(root.glob("*/__init__.py"))
    }


def _import_own() -> None:
    families = pkgutil.iter_modules(importlib.import_module(FAMILIES).__path__)
    for package in (*_CORE, *(f"{FAMILIES}.{family.name}" for family in families), *studies()):
        importlib.import_module(package)


def _import_plugins() -> None:
    listed = (name.strip() for name in os.environ.get(PLUGINS, "").split(","))
    for name in filter(None, listed):
        fix = "name modules importable from the current folder"
        import_user_module(name, f"{PLUGINS}={name}", fix)


def user_function(name: str, field: str, fix: str) -> Callable[..., Any]:
    """Return a user's `PACKAGE.MODULE:FUNCTION`, named by a field; `UserError` if there is none."""
    module, _, function = name.partition(":")
    if not (module and function) or module.startswith("."):
        raise UserError(f"{field}={name}: {fix}")
    found = getattr(import_user_module(module, f"{field}={name}", fix), function, None)
    if not callable(found):
        raise UserError(f"{field}={name}: {module} has no function {function!r}")
    return found


def import_user_module(name: str, asked: str, fix: str) -> ModuleType:
    """Import a module, also from the current folder, or raise a `UserError` with these words."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # users write modules in the folder they work in
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Another missing name is a defect inside the module and keeps its traceback.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UserError(f"{asked}: no module {error.name!r}{seen_from('')}; {fix}") from error
