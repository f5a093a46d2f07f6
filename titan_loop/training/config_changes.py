"""Changes that a start makes to a run that it continues: one line per field, old → new.

`config.json` has the config of the last start.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import finite_or_null
from titan_loop.training.config import DERIVED, RunConfig
from titan_loop.training.schedule import Knot, Schedule

# Not compared: a start's folder and checkpoint, derived fields, and consent to changes.
_NOT_SETTINGS = (
    "dump_folder",
    "checkpoint.load_step",
    "optimizer.param_groups",
    *DERIVED,
    "dataloader.accept_change",
)


def setting_changes(config: RunConfig) -> list[str]:
    """Return the changes since a resolved run's last start, in fields that both starts have."""
    run = RunDirectory(config.dump_folder)
    if not run.config_json.exists():
        return []
    now = dict(_leaves(finite_or_null(config.to_dict())))
    before = dict(_leaves(run.read_config()))
    return [
        f"{name} {before[name]} → {value}"
        for name, value in now.items()
        if before.get(name, value) != value and not name.startswith(_NOT_SETTINGS)
    ]


def _leaves(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in record.items():
        if isinstance(value, Mapping) and set(value) == {"knots"}:
            schedule = Schedule(tuple(Knot(**knot) for knot in value["knots"]))
            yield prefix + name, repr(str(schedule))
        elif isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value)
