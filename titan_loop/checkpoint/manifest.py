"""The commit record of a checkpoint: a small JSON file, written last, by rank 0.

Format version 2:

    step, created      training steps done, UTC time
    trainer            `LoopTrainer.state_dict`: tokens, R, the model's architecture
    data               the loader's `state_dict`: windows consumed, by source
    lineage            parent checkpoint, recipe hash, stage, library versions; after upcycling
                       `upcycled`: the source of every layer (`upcycling.upcycle_checkpoint`);
                       after merging `merged`: its parents (`merging.merge_checkpoints`)
    best               the best checkpoint so far of a run with `--best`, see `keep_policy.py`
    stage_end          whether the stage ended here; such a checkpoint is kept forever
    files              name -> {"bytes", "sha256"} of every file the ranks wrote
    sha256             of all of the above

The hashes find damage. They do not protect against an attacker, who can write a manifest, too.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

from titan_loop.errors import UserError, runs_in
from titan_loop.storage.file_names import is_file_name
from titan_loop.storage.json_files import (
    DamagedFileError,
    finite_or_null,
    nested,
    read_json_object,
    write_json,
)
from titan_loop.storage.transient import ShortReadError, retried, unreadable

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
METADATA = ".metadata"
"""DCP's table of entries for torch's tools; a pickle can run code, so it is never read here."""

TABLE = "tensors.json"
"""Table of entries that we read instead; see `tensor_table.py`."""


class DamagedCheckpointError(UserError):
    """A file of a checkpoint is missing, truncated or altered."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)  # pickle rebuilds it on other ranks from these
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path} is damaged: {self.reason}; use another checkpoint"


class Reference(TypedDict):
    """A checkpoint in a lineage: its folder and its identity."""

    path: str
    manifest_sha256: str


class FileRecord(TypedDict):
    """One file of a checkpoint, as its manifest records it."""

    bytes: int
    sha256: str


def new_content(
    step: int,
    trainer: Mapping[str, Any],
    *,
    stage_end: bool,
    data: Mapping[str, Any],
    lineage: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a manifest's content, created now; the caller adds `files`."""
    return {
        "step": step,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "stage_end": stage_end,
        "trainer": trainer,
        "data": data,
        "lineage": lineage,
    }


def untrained(
    recurrent_steps: int,
    architecture: Mapping[str, Any],
    *,
    data: Mapping[str, Any],
    lineage: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a manifest's content for step 0 of a model made from another one's weights."""
    trainer = {
        "step": 0,
        "tokens": 0,
        "recurrent_steps": recurrent_steps,
        "architecture": architecture,
    }
    return new_content(0, trainer, stage_end=True, data=data, lineage=lineage)


def write_manifest(checkpoint: Path, content: dict[str, Any]) -> Reference:
    """Commit the checkpoint in folder `checkpoint`: temporary file, fsync, rename."""
    record = {**content, "format_version": FORMAT_VERSION}
    digest = _digest(record)
    write_json(checkpoint / MANIFEST, {**record, "sha256": digest})
    return {"path": str(checkpoint.resolve()), "manifest_sha256": digest}


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the commit record of the checkpoint in folder `checkpoint`.

    Raises:
        DamagedCheckpointError: The manifest was altered, or is not one.
        UserError: It does not exist, may not be read, or another version of titan_loop wrote it.
        RunFailedError: The disk fails, which says nothing about the checkpoint.
    """
    path = checkpoint / MANIFEST
    try:
        manifest = read_json_object(path, fix="use another checkpoint")
    except FileNotFoundError as error:
        raise UserError(
            f"{checkpoint} has no {MANIFEST}: it is neither a run nor a checkpoint whose save "
            f"finished; {runs_in(checkpoint, 'choose another')}"
        ) from error
    except OSError as error:
        raise unreadable(path, error, "check its disk") from error
    except DamagedFileError as error:
        raise DamagedCheckpointError(path, f"not a manifest ({error.reason})") from error
    version = manifest.get("format_version")
    if type(version) is not int:
        raise DamagedCheckpointError(path, f"format_version={version!r} is not a number")
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path} has format version {version}, this titan_loop reads {FORMAT_VERSION}; use the "
            "version that wrote it"
        )
    if manifest.get("sha256") != _digest(manifest):
        raise DamagedCheckpointError(path, "it has a different SHA-256 than when it was written")
    if wrong := _wrong_content(manifest):
        raise DamagedCheckpointError(path, wrong)
    return manifest


def reference(checkpoint: Path) -> Reference:
    """Return the reference to a committed checkpoint for a descendant's lineage."""
    digest = read_manifest(checkpoint)["sha256"]
    return {"path": str(checkpoint.resolve()), "manifest_sha256": digest}


def file_records(
    checkpoint: Path, rank: int | None = None, further: Sequence[str] = ()
) -> dict[str, FileRecord]:
    """Return sizes and hashes of the files that a rank wrote, some by name; None for all ranks."""
    written = "*.distcp" if rank is None else f"__{rank}_*.distcp"
    names = sorted(path.name for path in checkpoint.glob(written))
    if not rank:  # rank 0 writes the tables of entries, too
        names += [METADATA, TABLE]
    names += further
    return {name: _record(checkpoint / name) for name in names}


def find_damage(
    checkpoint: Path, records: Mapping[str, FileRecord], *, hashes: bool = True
) -> dict[str, str]:
    """Compare files with their records; return damaged file → a phrase that names it.

    Raises if a file may not be read or the disk fails, which says nothing about the checkpoint.
    """
    damage: dict[str, str] = {}
    for name, record in records.items():
        path = checkpoint / name
        try:
            status = retried(path.stat)
            if not stat.S_ISREG(status.st_mode):
                damage[name] = f"{name} is not a regular file"
            elif status.st_size != record["bytes"]:
                damage[name] = f"{name} has {status.st_size} bytes instead of {record['bytes']}"
            elif hashes and _record(path)["sha256"] != record["sha256"]:
                damage[name] = f"{name} has a different SHA-256 than when it was written"
        except FileNotFoundError:
            damage[name] = f"{name} is missing"
        except OSError as error:
            raise unreadable(path, error, "check its disk and permissions") from error
    return damage


def _wrong_content(manifest: Mapping[str, Any]) -> str:
    """Return a phrase for an impossible entry of a manifest; empty if there is none."""
    for name in ("trainer", "trainer.architecture", "data", "lineage", "files"):
        if not isinstance(nested(manifest, name), dict):
            return f"it has no {name}"
    smallest = {"step": 0, "trainer.step": 0, "trainer.tokens": 0, "trainer.recurrent_steps": 1}
    for name, least in smallest.items():
        value = nested(manifest, name)
        if type(value) is not int or not least <= value < 2**63:
            return f"{name}={value!r} is not an integer of at least {least}"
    for name in ("parent", "origin"):
        source = manifest["lineage"].get(name)
        if source is not None and not _has(source, Reference.__annotations__):
            return f"lineage.{name} is not a path and a hash"
    if not isinstance(jumps := manifest["lineage"].get("jumps", []), list):
        return f"lineage.jumps={jumps!r:.40} is not a list"
    best, kinds = manifest.get("best"), {"step": int, "held_out_loss": float, "measured_on": str}
    if best is not None and not _has(best, kinds):
        return f"best={best!r:.40} is not a step with its loss"
    for name, record in manifest["files"].items():
        if not is_file_name(name):
            return f"{name!r} is not the name of a file"
        if not _has(record, FileRecord.__annotations__):
            return f"{name} has no size and hash"
    return ""


def _has(record: Any, kinds: Mapping[str, type]) -> bool:
    return isinstance(record, dict) and all(type(record.get(n)) is kinds[n] for n in kinds)


def _digest(record: dict[str, Any]) -> str:
    hashed = {name: value for name, value in record.items() if name != "sha256"}
    canonical = json.dumps(finite_or_null(hashed), sort_keys=True, ensure_ascii=False)
    # Text may hold half a surrogate pair, which UTF-8 cannot encode; it must hash, too.
    return hashlib.sha256(canonical.encode(errors="backslashreplace")).hexdigest()


def _record(path: Path) -> FileRecord:
    def read() -> FileRecord:
        with path.open("rb") as file:
            digest, found = hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
            if found < os.fstat(file.fileno()).st_size:
                raise ShortReadError(path, f"only {found} bytes were read")
            return {"bytes": found, "sha256": digest}

    return retried(read)
