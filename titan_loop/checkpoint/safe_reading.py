"""Reads DCP checkpoints that may come from anyone: nothing in them runs.

    .metadata       an unpickler that makes DCP's own plain records and nothing else
    byte entries    torch.load(weights_only=True); stock DCP would unpickle anything
    tensors         torch.load(weights_only=True), as in DCP

Forbidden content raises `UserError`, truncated or garbled files raise `DamagedCheckpointError`. The
manifest's hashes find damage but do not protect: an attacker writes a manifest, too.

The unpickler is our own because torch's restricted one reads only what `torch.save` wrote, and
`.metadata` is a bare pickle.
"""

import io
import pickle
import re
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from titan_loop.checkpoint.manifest import METADATA, DamagedCheckpointError
from titan_loop.checkpoint.pickle_programs import MOST_BYTES, check_program
from titan_loop.errors import RunFailedError, UserError, first_line
from titan_loop.storage.file_names import require_file_name
from titan_loop.storage.regular_file import DamagedFileError, read_regular
from titan_loop.storage.transient import count_retry, retried, unreadable


def read_metadata(checkpoint: Path) -> dcp.Metadata:
    """Return DCP's metadata of a checkpoint, in the memory and a few times the time of stock DCP.

    Raises:
        UserError: It names something besides DCP's records, or files outside the checkpoint.
        DamagedCheckpointError: It is missing, truncated or garbled.
    """
    path = checkpoint / METADATA
    try:
        content = read_regular(path, fix="use another checkpoint", most_bytes=MOST_BYTES)
        check_program(content)
        metadata = _MetadataUnpickler(io.BytesIO(content), path).load()
        del content
        _check_metadata(metadata, path)
    except DamagedFileError as error:
        raise DamagedCheckpointError(path, error.reason) from error
    except UserError:
        raise
    except FileNotFoundError as error:
        raise DamagedCheckpointError(path, "it is missing") from error
    except OSError as error:
        raise unreadable(path, error, "check its disk and permissions") from error
    except Exception as error:  # garbled bytes make a pickle fail in any way
        raise DamagedCheckpointError(path, f"not DCP's metadata ({first_line(error)})") from error
    return metadata


_MOST_DIMENSIONS = 64  # as many as torch has
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
    def __init__(self, file: io.BytesIO, path: Path) -> None:
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
    """Raise unless the records are what DCP writes: every tensor tiled by chunks, all stored.

    Every tensor is also as small as what is stored of it, so that it can be allocated.
    """
    stored: dict[tuple[str, torch.Size | None], int] = {}
    ends: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        if not _is_place(index, info):
            raise DamagedCheckpointError(path, f"not a place of an entry: {type(index).__name__}")
        name = info.relative_path
        require_file_name(name, path)
        if not name.endswith(filesystem.DEFAULT_SUFFIX):
            raise DamagedCheckpointError(path, f"{name} holds no tensors")
        stored[index.fqn, index.offset] = info.length
        ends[name] = max(ends.get(name, 0), info.offset + info.length)
    for name, end in ends.items():
        file = path.with_name(name)
        if file.exists() and end > (size := file.stat().st_size):  # readers name a missing one
            raise DamagedCheckpointError(path, f"{name} has {size} bytes, entries up to {end}")
    for key, entry in metadata.state_dict_metadata.items():
        if type(key) is not str or not key.isprintable():
            raise DamagedCheckpointError(path, "the name of an entry is not printable text")
        if type(entry) is dcp.TensorStorageMetadata:
            whole = _is_stored(key, entry, stored)
        else:
            whole = type(entry) is dcp.BytesStorageMetadata and (key, None) in stored
        if not whole:
            raise DamagedCheckpointError(path, f"{key} is incomplete")


def _is_stored(
    key: str, entry: dcp.TensorStorageMetadata, stored: dict[tuple[str, torch.Size | None], int]
) -> bool:
    """Return whether the chunks make up the tensor, and are as long as what they hold."""
    if not (
        _is_shape(entry.size)
        and isinstance(entry.properties.dtype, torch.dtype)
        and all(_is_shape(chunk.offsets) and _is_shape(chunk.sizes) for chunk in entry.chunks)
    ):
        return False
    item_bytes = entry.properties.dtype.itemsize
    return (
        sum(prod(chunk.sizes) for chunk in entry.chunks) == prod(entry.size)
        and len({chunk.offsets for chunk in entry.chunks}) == len(entry.chunks)
        and all(
            len(chunk.offsets) == len(chunk.sizes) == len(entry.size)
            and all(map(_is_within, chunk.offsets, chunk.sizes, entry.size))
            and prod(chunk.sizes) * item_bytes <= stored.get((key, chunk.offsets), -1)
            for chunk in entry.chunks
        )
    )


def _is_within(offset: int, size: int, whole: int) -> bool:
    return offset + size <= whole


def _is_place(index: Any, info: Any) -> bool:
    return (
        type(index) is dcp.MetadataIndex
        and type(index.fqn) is str
        and (index.offset is None or _is_shape(index.offset))
        and type(info) is filesystem._StorageInfo
        and type(info.relative_path) is str
        and _is_count(info.offset)
        and _is_count(info.length)
        and not info.transform_descriptors  # we compress nothing
    )


def _is_shape(value: Any) -> bool:
    return (
        type(value) is torch.Size and len(value) <= _MOST_DIMENSIONS and all(n >= 0 for n in value)
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


class SafeFileSystemReader(filesystem.FileSystemReader):
    """DCP's reader of a folder, with metadata that was read safely.

    Args:
        checkpoint: The folder.
        metadata: Result of `read_metadata`.
    """

    def __init__(self, checkpoint: Path, metadata: dcp.Metadata) -> None:
        super().__init__(checkpoint)
        self._metadata = metadata
        self.storage_data = metadata.storage_data

    def read_metadata(self) -> dcp.Metadata:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the metadata given; without arguments, so that DCP asks for no rank's own."""
        return self._metadata

    def _slice_file(self, file: IO[bytes], sinfo: filesystem._StorageInfo) -> IO[bytes]:
        """Return the bytes of an entry, once the pickle in them is known to be harmless.

        Raises:
            ValueError: It is not of the kind that `torch.save` writes.
        """
        entry = super()._slice_file(file, sinfo)
        if entry.read(len(_ARCHIVE)) != _ARCHIVE:
            raise ValueError("not an archive")  # torch would unpickle it in an older way
        entry.seek(0)
        archive = torch._C.PyTorchFileReader(entry)
        check_program(archive.get_record("data.pkl"))
        entry.seek(0)
        return entry

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read file by file, so that what fails has a name.

        Raises:
            UserError: A byte entry, or a tensor, is not plain data.
            DamagedCheckpointError: A file is missing, truncated or garbled.
            RunFailedError: The disk fails.
        """
        per_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            name = self.storage_data[item.storage_index].relative_path
            per_file.setdefault(name, []).append(item)
        for items in per_file.values():
            try:
                retried(partial(super().read_data, LoadPlan(items), planner))
            except Exception:  # garbled bytes, or too few of them, make torch fail in any way
                count_retry()
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

    def _explain(self, error: Exception, index: dcp.MetadataIndex) -> UserError | RunFailedError:
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
    """DCP's planner with byte entries that hold plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an object that is plain data: numbers, strings, containers, tensors."""
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, loaded)


def root_cause(error: BaseException) -> BaseException:
    """Return the error that DCP wrapped in a `CheckpointException`, which is not an `Exception`.

    torch's writer swallows the system's error and complains about a file position: that becomes an
    `OSError` which says what it means.
    """
    while isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, RuntimeError) and "inline_container" in str(error):
        return OSError(
            f"a file could not be written to its end: no space or a size limit? {first_line(error)}"
        )
    return error
