"""Changes that a start makes to a run that it continues: one line per field, old → new.

`config.json` has the config of the last start. Schedules may change freely, as a longer run
requires. Other optimiser settings need consent: a checkpoint's moments stem from the old ones.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.errors import Refusal, UserError
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun, vocabulary_of
from titan_loop.storage.json_files import finite_or_null
from titan_loop.text.tokenizer import TOKENIZER_NAME
from titan_loop.training.config import DERIVED, RunConfig
from titan_loop.training.depth_schedule import typical_recurrent_steps
from titan_loop.training.resolved_run import ResolvedRun
from titan_loop.training.schedule import Knot, Schedule

# Not compared: a start's folder and checkpoint, derived fields, and consent to changes.
_NOT_SETTINGS = (
    "dump_folder",
    "checkpoint.load_step",
    "optimizer.param_groups",
    *DERIVED,
    "accept_change",
    "dataloader.accept_change",
)


class SettingChange(NamedTuple):
    """A changed field: its dotted name, and both values as text."""

    field: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.field} {self.before} → {self.now}"


def setting_changes(config: RunConfig) -> list[SettingChange]:
    """Return the changes since a resolved run's last start, in fields that both starts have."""
    run = RunDirectory(config.dump_folder)
    if not run.config_json.exists():
        return []
    now = dict(_leaves(finite_or_null(config.to_dict())))
    before = dict(_leaves(run.read_config()))
    return [
        SettingChange(name, before[name], value)
        for name, value in now.items()
        if before.get(name, value) != value and not name.startswith(_NOT_SETTINGS)
    ]


def parent_changes(run: ResolvedRun) -> list[SettingChange]:
    """Return the differences between a new run and its weights' parent; [] without one."""
    carry = run.config.checkpoint.carry
    if not carry.parent:
        return []
    checkpoint = carry.find_parent()
    trained = read_manifest(checkpoint)["trainer"]
    before = {f"model.{name}": value for name, value in trained["architecture"].items()}
    now: dict[str, Any] = {f"model.{name}": value for name, value in run.architecture.items()}
    before["recurrent steps"] = trained["recurrent_steps"]
    now["recurrent steps"] = typical_recurrent_steps(run.config.recurrence, 0)
    with contextlib.suppress(UserError):  # raised for a checkpoint copied out of its run
        parent = SavedRun.open(checkpoint)
        before["window"], now["window"] = parent.seq_len, run.config.training.seq_len
        before["vocabulary"] = parent.vocabulary()
        vocabulary = vocabulary_of(run.config.open_data().state_dict())
        sources = [Path(source) / TOKENIZER_NAME for source in run.config.dataloader.source_paths()]
        known = vocabulary in (None, before["vocabulary"])
        known = known or bool(sources and all(map(parent.reads, sources)))
        now["vocabulary"] = before["vocabulary"] if known else vocabulary
    return [
        SettingChange(name, str(before[name]), str(value))
        for name, value in now.items()
        if before.get(name, value) not in (value, None)
    ]


def change_refusals(config: RunConfig) -> Iterator[Refusal]:
    """Refuse to continue from a checkpoint under other optimiser settings without consent."""
    # The optimiser's saved state depends on them.
    fields = ("optimizer.name", *(f"{name}." for name in config.optimizers()))
    found = [c for c in setting_changes(config) if c.field.startswith(fields)]
    if found and not config.accept_change:
        problem = "the optimizer's state was gathered with other settings than this start has: "
        fix = "undo this, start in another dump_folder, or continue with --accept-change"
        yield Refusal(found[0].field, problem + "; ".join(map(str, found)), fix)


def _leaves(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in record.items():
        if isinstance(value, Mapping) and set(value) == {"knots"}:
            schedule = Schedule(tuple(Knot(**knot) for knot in value["knots"]))
            yield prefix + name, repr(str(schedule))
        elif isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value)
