"""Rewinds of a run: the windows that each jumps over, and the checkpoints that it gives up.

    recorded in REMOTE/STAGE/rewinds.json, then in RUN/rewinds.json
      ─► every start sets aside (in the store: deletes) older checkpoints of steps past `to_step`
      ─► the newest one left is loaded, without the recorded windows; its lineage lists the rewinds

The record is the commit: a start completes the work of a killed one, here or in the store.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_loop.checkpoint.folders import committed_steps, set_aside, step_folder
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.checkpoint.remote import RemoteCheckpoints
from titan_loop.errors import RunFailedError, UserError
from titan_loop.storage.json_files import nested, read_json_object, write_json

logger = logging.getLogger(__name__)

REWINDS = "rewinds.json"

Rewind = Mapping[str, Any]
"""`step`: the last spike; `windows`: [first, stop) ranges to jump over; `to_step`: the checkpoint
that training goes on from."""


def read_rewinds(run: Path) -> list[Rewind]:
    """Return the rewinds of a run, the first one first; raise `UserError` if damaged."""
    path, fix = run / REWINDS, "delete it to go on without jumping over the windows of spikes"
    try:
        rewinds = read_json_object(path, fix=fix).get("rewinds")
    except FileNotFoundError:
        return []
    if not isinstance(rewinds, list) or not all(map(_is_rewind, rewinds)):
        raise UserError(f"{path} is damaged (rewinds={rewinds!r:.80}); {fix}")
    return rewinds


def record_rewind(run: Path, remote: RemoteCheckpoints | None, rewind: Rewind) -> None:
    """Add a rewind to the record, in the store first: the loss of the disk must not undo it."""
    rewinds = {"rewinds": [*read_rewinds(run), rewind]}
    if remote is not None:
        remote.write(REWINDS, rewinds)
    write_json(run / REWINDS, rewinds)


def take_up_rewinds(run: Path, checkpoints: Path, remote: RemoteCheckpoints | None) -> None:
    """Complete the record of rewinds and give up the checkpoints it rules out, in both places."""
    here = read_rewinds(run)
    there = [] if remote is None else remote.read(REWINDS).get("rewinds", [])
    rewinds = max(here, there, key=len)
    if not rewinds:
        return
    if len(here) < len(rewinds):
        write_json(run / REWINDS, {"rewinds": rewinds})
    if remote is not None and len(there) < len(rewinds):
        remote.write(REWINDS, {"rewinds": rewinds})
    for step in committed_steps(checkpoints):
        checkpoint = step_folder(checkpoints, step)
        try:
            given_up = is_given_up(read_manifest(checkpoint), rewinds)
        except (UserError, RunFailedError) as error:
            logger.warning("%s: %s", checkpoint, error)  # the choice of a checkpoint skips it, too
            continue
        if given_up:
            set_aside(checkpoint, "rewound")
    if remote is not None:
        remote.withdraw(lambda manifest: is_given_up(manifest, rewinds))


def is_given_up(manifest: Mapping[str, Any], rewinds: Sequence[Rewind]) -> bool:
    """Return whether a rewind after this checkpoint went back to an earlier step."""
    known = len(manifest["lineage"].get("jumps", []))
    return any(manifest["step"] > rewind["to_step"] for rewind in rewinds[known:])


def jumped_windows(rewinds: Sequence[Rewind]) -> list[tuple[int, int]]:
    """Return the ranges (first, stop) of windows that rewinds jump over."""
    return [(first, stop) for rewind in rewinds for first, stop in rewind["windows"]]


def _is_rewind(value: Any) -> bool:
    windows = nested(value, "windows") if isinstance(value, dict) else None
    return (
        isinstance(windows, list)
        and all(
            isinstance(pair, list) and [type(n) for n in pair] == [int, int] for pair in windows
        )
        and all(0 <= first < stop < 2**63 for first, stop in windows)
        and type(value.get("to_step")) is int
    )
