"""Turns the `config.json` of a run into the recipe that trains it again.

    config.json ─ names of classes ─► classes ─ fields, checked against their types ─► RunConfig

Classes come from titan_loop and `TITAN_LOOP_PLUGINS` only: nothing that the file names is imported,
and nothing in it is executed.
"""

import importlib
import inspect
import json
import logging
import math
import pkgutil
from collections.abc import Iterator
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import tyro

from titan_loop.data.tasks.recorded_task import find_task
from titan_loop.errors import UserError, nearest
from titan_loop.models.family import get_family, without_retired
from titan_loop.plugins import PLUGINS, find
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.runs.saved_run import SavedRun
from titan_loop.storage.json_files import nested
from titan_loop.training.config import CHOSEN, CLASSES, DERIVED, RETIRED, TASK_FIELD, RunConfig
from titan_loop.training.schedule import Knot, Schedule

logger = logging.getLogger(__name__)


def recorded_recipe(path: Path, *, goes_on: bool = False) -> Recipe:
    """Return the recipe that trains a run again, in a folder beside it that ends in "-again".

    It reads the same sources, wherever they are now, and starts from the same parent checkpoint.

    Args:
        goes_on: Whether to go on in the run's own folder instead, from its newest checkpoint.
    """
    run = SavedRun(path.parent)
    before = run.lineage()[:-1]
    if run.parent is None and before and not goes_on:
        raise UserError(
            f"{path}: this run began as a copy of {before[-1].checkpoint}, which the file does not "
            "name; make that copy again, and continue it with a recipe"
        )
    try:
        config = _Reading().config(_with_paths_found(run))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if before and not (goes_on and run.parent is None):
        config.checkpoint.carry.parent = str(before[-1].checkpoint)
    elif run.parent is not None:
        config.checkpoint.carry.parent = str(run.parent)
    name = config.stage or "run"
    stage = Stage(name=name, config=config)
    folder = str(run.path) if goes_on else f"{run.path.resolve()}-again"
    return Recipe(name=name, stages=[stage], folder=folder)


def _with_paths_found(run: SavedRun) -> dict[str, Any]:
    held_out = run.config.get("held_out")
    record = {**run.config, "dataloader": run.dataloader}
    if isinstance(held_out, dict) and isinstance(held_out.get("sources"), list):
        sources = [str(run.found(path)) for path in map(str, held_out["sources"])]
        record["held_out"] = {**held_out, "sources": sources}
    return record


class _Reading:
    def __init__(self) -> None:
        self._classes: dict[str, type] = {}
        self._absent: list[str] = []

    def config(self, record: dict[str, Any]) -> RunConfig:
        names = record.pop(CLASSES, None)
        if not isinstance(names, dict) or set(names) != {*CHOSEN, TASK_FIELD}:
            raise UserError(
                f"{CLASSES!r} does not name the classes of {', '.join(CHOSEN)}: an older version, "
                "an import or a merge wrote this file; train the recipe that run.json names, or "
                "one that starts from this run: titan-loop train RECIPE --from RUN"
            )
        for field, name in names.items():
            if name is not None:
                found = find_task(str(name)) if field == TASK_FIELD else _chosen(field, str(name))
                self._classes[field] = found
        family = str(nested(record, "model.family"))
        self._classes["model"] = get_family(family).options
        record["model"] = without_retired(record["model"])
        config = self._built(RunConfig, record, "")
        if self._absent:
            logger.warning("not in config.json, so at their defaults: %s", ", ".join(self._absent))
        return config

    def _built(self, kind: type, record: Any, name: str) -> Any:
        if not isinstance(record, dict):
            raise UserError(f"{name}={record!r:.40} must be an object")
        hints = get_type_hints(kind, include_extras=True)
        known = {field.name: field for field in fields(kind)}
        values: dict[str, Any] = {}
        for key, recorded in record.items():
            dotted = _dotted(name, key)
            if key not in known and dotted not in RETIRED:
                raise UserError(f"{dotted} is unknown to this version{nearest(key, known)}")
            if dotted in RETIRED and isinstance(recorded, dict) and recorded.get("enabled"):
                raise UserError(
                    f"{dotted}.enabled=True is a recipe's own in this version; train the recipe "
                    "that run.json names"
                )
            if RETIRED.get(dotted, recorded) not in (None, recorded):
                raise UserError(
                    f"{dotted}={recorded!r:.40} is not in this version; use the version of "
                    "titan_loop that wrote it"
                )
        for key, field in known.items():
            dotted = _dotted(name, key)
            if dotted in DERIVED or not field.init:
                continue
            if key not in record:
                self._absent.append(dotted)
            elif tyro.conf.Suppress in getattr(hints[key], "__metadata__", ()):
                _require_default(dotted, field, record[key])
            else:
                values[key] = self._value(dotted, hints[key], field, record[key])
        try:
            return kind(**values)
        except (TypeError, ValueError) as error:  # a field without a default, or its own check
            reason = " ".join(str(error).split())
            raise UserError(f"{name}: {reason}" if name else reason) from error

    def _value(self, name: str, hint: Any, field: "Field[Any]", recorded: Any) -> Any:
        if recorded is None and name in CHOSEN:
            return None
        if recorded is None and {float} <= {*(get_args(hint) or (hint,))} <= {int, float}:
            return math.inf  # which JSON has no number for
        default = _default(field)
        kind = self._classes.get(name, type(default))
        if is_dataclass(kind) and kind is not Schedule:
            return self._built(kind, recorded, name)
        if isinstance(recorded, list) and not _names(hint, list):
            return tuple(recorded)  # which JSON does not have
        if _names(hint, Schedule) and isinstance(recorded, dict):
            try:
                return Schedule(tuple(Knot(**knot) for knot in recorded["knots"]))
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(f"{name}={recorded!r:.40} is not a schedule: {error}") from error
        return recorded


def _dotted(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _chosen(field: str, name: str) -> type:
    base, packages = CHOSEN[field]
    for package in packages:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            importlib.import_module(f"{package}.{module.name}")
    find("objectives", name)  # imports the module of a family's objective, or plug-ins
    known = {kind.__name__: kind for kind in _concrete(base)}
    if name not in known:
        raise UserError(
            f"{CLASSES}.{field}={name} is a class that this version does not have"
            f"{nearest(name, known)}; name the module of a class of yours in {PLUGINS}"
        )
    return known[name].Config


def _concrete(base: type) -> Iterator[Any]:
    for kind in base.__subclasses__():
        if not inspect.isabstract(kind):
            yield kind
        yield from _concrete(kind)


def _default(field: "Field[Any]") -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default


def _require_default(name: str, field: "Field[Any]", recorded: Any) -> None:
    default = _default(field)
    if is_dataclass(default) and not isinstance(default, type):
        default = asdict(default)
    if recorded != json.loads(json.dumps(default, default=repr)):
        raise UserError(
            f"{name}={recorded!r:.60} was set by a recipe and cannot be made from a file; train "
            "that recipe"
        )


def _names(hint: Any, kind: type) -> bool:
    return kind in (hint, get_origin(hint)) or any(_names(part, kind) for part in get_args(hint))
