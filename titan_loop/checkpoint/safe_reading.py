"""Reads DCP checkpoints that may come from anyone: nothing in them runs.

    .metadata       an unpickler that makes DCP's own plain records and nothing else
    byte entries    torch.load(weights_only=True); stock DCP would unpickle anything
    tensors         torch.load(weights_only=True), as in DCP

What is forbidden is a `UserError`; what is truncated or garbled, a `DamagedCheckpointError`. The
manifest's hashes find damage, they are no protection: an attacker writes a manifest, too.
"""

import io
import logging
import pickle
import re
import warnings
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from titan_loop.checkpoint.damage import DamagedCheckpointError
from titan_loop.checkpoint.dcp_errors import root_cause
from titan_loop.checkpoint.files import METADATA
from titan_loop.checkpoint.keys import SHOWN, KeyMatch, KeyPolicy, check_keys
from titan_loop.errors import UserError
from titan_loop.ranks import from_rank_zero

logger = logging.getLogger(__name__)


def load_checkpoint(
    state_dict: dict[str, Any],
    checkpoint: Path,
    *,
    group: dist.ProcessGroup | None,
    policy: KeyPolicy | None = None,
) -> None:
    """Load a checkpoint of any world size into `state_dict`, in place; collective over `group`.

    Args:
        state_dict: As `torch.distributed.checkpoint.load` takes it: tensors are allocated.
        checkpoint: Its folder.
        group: A gloo group of all ranks; None loads into this process alone.
        policy: Which entries may differ; None for none.

    Raises:
        UserError: On every rank: the entries differ, or something in the files is forbidden.
        DamagedCheckpointError: On every rank: a file is missing, truncated or garbled.
    """
    # Not left to DCP: it would swallow what is wrong, and look for metadata of single ranks.
    metadata = from_rank_zero(group, lambda: read_metadata(checkpoint))
    planner = StrictLoadPlanner(checkpoint, policy or KeyPolicy())
    reader = SafeFileSystemReader(checkpoint, metadata)
    try:
        with warnings.catch_warnings():
            # One process is what a caller without a group wants.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(
                state_dict,
                storage_reader=reader,
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        raise root_cause(error) from error
    assert planner.match is not None
    for entries, what in (
        (planner.match.ignored, "entries of %s are not loaded, as asked: %s"),
        (planner.match.kept, "entries are not in %s and keep their initial value, as asked: %s"),
    ):
        if entries:
            more = ", …" if len(entries) > SHOWN else ""
            logger.info(f"%d {what}", len(entries), checkpoint, ", ".join(entries[:SHOWN]) + more)


def read_metadata(checkpoint: Path) -> dcp.Metadata:
    """Return DCP's metadata of a checkpoint; memory and time as stock DCP.

    Raises:
        UserError: It names something besides DCP's records, or files outside the checkpoint.
        DamagedCheckpointError: It is missing, truncated or garbled.
    """
    path = checkpoint / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file, path).load()
        _check_metadata(metadata, path)
    except UserError:
        raise
    except FileNotFoundError as error:
        raise DamagedCheckpointError(path, "it is missing") from error
    except OSError as error:
        raise DamagedCheckpointError(path, f"it cannot be read ({error.strerror})") from error
    except Exception as error:  # garbled bytes make a pickle fail in any way
        raise DamagedCheckpointError(path, f"not DCP's metadata ({_first_line(error)})") from error
    return metadata


_ARCHIVE = b"PK\x03\x04"  # how everything that torch.save writes begins


class _Sealed(type):
    """The type of classes that a pickle can call, but not change.

    Pickle's BUILD sets attributes of whatever was made last, be it a class: a file could replace
    methods that this process uses later.
    """

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"an attribute {name} is set on a class")


def _sealed(make: Callable[..., Any]) -> type:
    """Return what the pickle sees in a class's stead; calling it returns `make(*arguments)`."""
    return _Sealed("Sealed", (), {"__new__": lambda _, *arguments: make(*arguments)})


def _record(cls: type) -> type:
    """Return the stand-in of a record that is made empty and filled by its state."""
    return _sealed(partial(object.__new__, cls))


_MEMORY_FORMAT = _sealed(dcp._MEM_FORMAT_ENCODING)


def _memory_format(owner: type, name: str) -> Any:
    """Do what `getattr` does where Python 3.11.0 to 3.11.3 pickled an enumeration, no more."""
    if owner is not _MEMORY_FORMAT:
        raise pickle.UnpicklingError(f"attribute {name} of {owner} is read")
    return dcp._MEM_FORMAT_ENCODING[name]


_ALLOWED = {
    **{
        ("torch.distributed.checkpoint.metadata", cls.__name__): _record(cls)
        for cls in (
            dcp.BytesStorageMetadata,
            dcp.ChunkStorageMetadata,
            dcp.Metadata,
            dcp.MetadataIndex,
            dcp.StorageMeta,
            dcp.TensorProperties,
            dcp.TensorStorageMetadata,
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _record(filesystem._StorageInfo),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _MEMORY_FORMAT,
    ("builtins", "getattr"): _sealed(_memory_format),
    ("torch", "Size"): _sealed(torch.Size),
    ("torch.serialization", "_get_layout"): _sealed({"torch.strided": torch.strided}.__getitem__),
    # Where it was saved, which nothing reads. The module's name depends on the Python version.
    ("pathlib", "PosixPath"): _sealed(PurePosixPath),
    ("pathlib._local", "PosixPath"): _sealed(PurePosixPath),
}


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BufferedReader, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        allowed = _ALLOWED.get((module, name))
        if allowed is not None:
            return allowed
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise UserError(
            f"{self._path} names {f'{module}.{name}'!r}, which no checkpoint needs: it is damaged, "
            "or made to run code where it is loaded; nothing of it was run, do not use it"
        )


def _check_metadata(metadata: dcp.Metadata, path: Path) -> None:
    """Raise unless the records are what DCP writes: every tensor tiled by chunks, all stored."""
    stored = {}
    for index, info in metadata.storage_data.items():
        name = info.relative_path
        if Path(name).name != name or not name.endswith(filesystem.DEFAULT_SUFFIX):
            raise UserError(f"{path} refers to {name!r} outside the checkpoint; do not use it")
        stored.setdefault(index.fqn, []).append(index.offset)
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, dcp.TensorStorageMetadata):
            offsets = [chunk.offsets for chunk in entry.chunks]
            whole = sum(prod(chunk.sizes) for chunk in entry.chunks) == prod(entry.size)
            whole = whole and len(set(offsets)) == len(offsets)
        else:
            offsets, whole = [None], isinstance(entry, dcp.BytesStorageMetadata)
        if not whole or not set(offsets) <= set(stored.get(key, [])):
            raise DamagedCheckpointError(path, f"{key} is incomplete")


class SafeFileSystemReader(filesystem.FileSystemReader):
    """DCP's reader of a folder, with metadata that was read safely.

    Args:
        checkpoint: The folder.
        metadata: From `read_metadata`.
    """

    def __init__(self, checkpoint: Path, metadata: dcp.Metadata) -> None:
        super().__init__(checkpoint)
        self._metadata = metadata
        self.storage_data = metadata.storage_data

    def read_metadata(self) -> dcp.Metadata:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the metadata given; without arguments, so that DCP asks for no rank's own."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read file by file, so that what fails has a name.

        Raises:
            UserError: A byte entry, or a tensor, is not plain data.
            DamagedCheckpointError: A file is missing, truncated or garbled.
        """
        per_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            name = self.storage_data[item.storage_index].relative_path
            per_file.setdefault(name, []).append(item)
        for items in per_file.values():
            try:
                super().read_data(LoadPlan(items), planner)
            except Exception:  # garbled bytes make torch fail in any way
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
                raise self._explain(error, item.storage_index) from error

    def _explain(self, error: Exception, index: dcp.MetadataIndex) -> UserError:
        info = self.storage_data[index]
        path = Path(self.path) / info.relative_path
        if isinstance(error, FileNotFoundError):
            return DamagedCheckpointError(path, "it is missing")
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
        return DamagedCheckpointError(
            path, f"entry {index.fqn!r} is garbled ({_first_line(error)})"
        )


class PlainLoadPlanner(DefaultLoadPlanner):
    """DCP's planner with byte entries that hold plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an object that is plain data: numbers, strings, containers, tensors."""
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, loaded)


class StrictLoadPlanner(PlainLoadPlanner):
    """Reads what is wanted if it is also what is saved.

    Args:
        checkpoint: The folder, for messages.
        policy: Which entries may differ.

    Attributes:
        match: Which entries are loaded and which are not; None until planned.
    """

    def __init__(self, checkpoint: Path, policy: KeyPolicy) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._policy = policy
        self.match: KeyMatch | None = None

    def create_local_plan(self) -> LoadPlan:
        """Plan to read the entries that are loaded.

        Raises:
            UserError: The entries differ in a way that the policy does not cover.
        """
        assert self.metadata is not None
        wanted = {
            key: tuple(value.shape) if isinstance(value, torch.Tensor) else None
            for key, value in self.state_dict.items()
        }
        self.match = check_keys(
            wanted, self.metadata, checkpoint=self._checkpoint, policy=self._policy
        )
        chosen = {key: self.state_dict[key] for key in self.match.loaded}
        return create_default_local_load_plan(chosen, self.metadata)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
