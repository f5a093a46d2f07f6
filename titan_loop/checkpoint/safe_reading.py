"""Reads the tensors and objects of DCP checkpoints that may come from anyone: nothing in them runs.

    tensors.json    JSON, see `tensor_table.py`
    entries         torch.load(weights_only=True); stock DCP would unpickle anything in objects

Forbidden content raises `UserError`, truncated or garbled files raise `DamagedCheckpointError`. The
manifest's hashes find damage but do not protect: an attacker writes a manifest, too.
"""

import io
import pickle
import re
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from titan_loop.checkpoint.manifest import DamagedCheckpointError
from titan_loop.errors import RunFailedError, UserError, first_line
from titan_loop.storage.transient import retried, unreadable

_ARCHIVE = b"PK\x03\x04"  # the first bytes of everything that torch.save writes


class SafeFileSystemReader(filesystem.FileSystemReader):
    """DCP's reader of a folder, with the description that `read_table` returned."""

    def __init__(self, checkpoint: Path, metadata: dcp.Metadata) -> None:
        super().__init__(checkpoint)
        self._metadata = metadata
        self.storage_data = metadata.storage_data

    def read_metadata(self) -> dcp.Metadata:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the description; takes no rank, so that DCP does not ask for a rank's own."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read file by file, so that an error can name the file."""
        per_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            name = self.storage_data[item.storage_index].relative_path
            per_file.setdefault(name, []).append(item)
        for items in per_file.values():
            try:
                retried(partial(super().read_data, LoadPlan(items), planner))
            except Exception:  # garbled bytes, or too few of them, make torch fail in any way
                self._read_one_by_one(items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_one_by_one(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        """Read again to find, and name, the entry that failed."""
        for item in items:
            try:
                super().read_data(LoadPlan([item]), planner)
            except Exception as error:
                raise self._explained(error, item.storage_index) from error

    def _explained(self, error: Exception, index: dcp.MetadataIndex) -> UserError | RunFailedError:
        info = self.storage_data[index]
        path = Path(self.path) / info.relative_path
        if isinstance(error, FileNotFoundError):
            return DamagedCheckpointError(path, "it is missing")
        if isinstance(error, OSError):
            return unreadable(path, error, "check its disk and permissions")
        if isinstance(error, pickle.UnpicklingError):
            with path.open("rb") as file:
                file.seek(info.offset)
                whole = file.read(len(_ARCHIVE)) == _ARCHIVE  # its check sums were right, too
            if whole:
                found = re.search(r"GLOBAL (\S+)", str(error))
                return UserError(
                    f"entry {index.fqn!r} in {path} is more than plain data"
                    f"{f' ({found[1]!r})' if found else ''}: it is made to run code where it is "
                    "loaded; nothing of it was run, do not use it"
                )
        return DamagedCheckpointError(path, f"entry {index.fqn!r} is garbled ({first_line(error)})")


class PlainLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which refuses byte entries that hold more than plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an object that is plain data: numbers, strings, containers, tensors."""
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, loaded)


def root_cause(error: BaseException) -> BaseException:
    """Return the error that DCP wrapped in a `CheckpointException`, which is not an `Exception`.

    torch's writer swallows the system's error and complains about a file position: that becomes an
    `OSError` that names the likely cause.
    """
    while isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, RuntimeError) and "inline_container" in str(error):
        return OSError(
            f"a file could not be written to its end: no space or a size limit? {first_line(error)}"
        )
    return error
