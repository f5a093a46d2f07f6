"""The step that a rehearsal measured, kept on disk under a hash of everything that decides it.

A rehearsal sees no values: stages that differ only in a seed, a source, a rate or the η of a prior
share one result. A field counts as a difference unless it is known to be such a value.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import titan_loop
from titan_loop.checkpoint.keep_policy import KeepPolicy
from titan_loop.errors import UserError
from titan_loop.planning.stage_needs import StageNeeds
from titan_loop.planning.step_meter import Moved, plus
from titan_loop.runs.run_directory import library_versions
from titan_loop.storage.json_files import read_versioned_json, write_json

FORMAT_VERSION = 1
CACHE_VARIABLE = "TITAN_LOOP_REHEARSAL_CACHE"  # names another folder than ~/.cache/titan_loop/…

_ONLY_VALUES = (
    "stage",
    "dump_folder",
    "total_tokens",
    "total_flops",
    "batch",  # its micro-batches are in the key
    "dataloader",  # its columns are compared instead
    "learning_rate",
    "callbacks",
    "debug.seed",
    "checkpoint.carry",
    "checkpoint.interval",
    *(f"checkpoint.{each.name}" for each in fields(KeepPolicy)),
    "held_out.interval",
    "held_out.sources",
    "suite",
)


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """One training step of rank 0, and its checkpoint.

    Attributes:
        moved: Collectives of the step by kind.
        moved_again: Collectives of its last micro-batch, which every further one repeats.
        checkpoint_bytes: Bytes that the rank would write to a checkpoint.
    """

    micro_batches: int
    moved: Mapping[str, Moved] = field(default_factory=dict)
    moved_again: Mapping[str, Moved] = field(default_factory=dict)
    peak_bytes: float
    checkpoint_bytes: int = 0

    def moved_in(self, micro_batches: float) -> dict[str, Moved]:
        """Return the collectives of a step with at least as many micro-batches."""
        return plus(self.moved, self.moved_again, max(0, round(micro_batches) - self.micro_batches))


def rehearsal_key(needs: StageNeeds, ranks: int, micro_batches: int) -> str:
    """Return 64 hexadecimal digits for everything that decides the result of a rehearsal."""
    loader = needs.config.dataloader
    decides = {
        "versions": library_versions(),
        "code": _own_code(),
        "config": traits(needs.config),
        "model": [type(needs.model), traits(needs.model.architecture)],
        "units": [[unit.unit, unit.shapes] for unit in needs.units],
        "columns": [traits(loader.columns()), loader.knows_depth()],
        "work": [ranks, needs.policy, needs.recurrent_steps, micro_batches],
        "reached": needs.config.recurrence.most_backward_steps,
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True, default=repr).encode()).hexdigest()


def read_measured(key: str) -> MeasuredStep | None:
    """Return the step that was measured under a key; None if there is none that can be read."""
    with suppress(OSError, RuntimeError, UserError, KeyError, TypeError):
        record = read_versioned_json(_file(key), format_version=FORMAT_VERSION, fix="delete it")
        del record["format_version"]
        for name in ("moved", "moved_again"):
            record[name] = {kind: Moved(**values) for kind, values in record[name].items()}
        return MeasuredStep(**record)
    return None


def write_measured(key: str, measured: MeasuredStep) -> None:
    """Keep a step; a folder that cannot be written only costs the time to measure again."""
    with suppress(OSError, RuntimeError):  # the latter if the user has no home
        write_json(_file(key), {"format_version": FORMAT_VERSION, **asdict(measured)})


def traits(value: Any, name: str = "") -> Any:
    """Return a config without values that do not decide; most floats become their sign."""
    if is_dataclass(value):
        inside = {field.name: getattr(value, field.name, None) for field in fields(value)}
        return [type(value), traits(inside, name)]
    if isinstance(value, Mapping):
        named = {key: f"{name}.{key}".lstrip(".") for key in value}
        return {
            key: traits(value[key], path) for key, path in named.items() if path not in _ONLY_VALUES
        }
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [traits(item, name) for item in value]
    if isinstance(value, float) and name != "activation_checkpoint.memory_budget":
        return (value > 0) - (value < 0)
    return value


def _file(key: str) -> Path:
    folder = os.environ.get(CACHE_VARIABLE) or "~/.cache/titan_loop/rehearsals"
    return Path(folder).expanduser() / f"{key}.json"


@cache
def _own_code() -> str:
    """Return a hash of this package's modules: versions stay the same while somebody edits."""
    digest, folder = hashlib.sha256(), Path(titan_loop.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
