"""The table of a checkpoint's entries, `tensors.json`: the place of every part of every tensor.

    {"sha256": …, "entries": {key: entry}}
      tensor    {"dtype": "float32", "shape": […], "chunks": [chunk, …]}
      chunk     [offsets, sizes, file, start, bytes]
      object    {"place": [file, start, bytes]}

DCP's own table is `.metadata`, a pickle, which can run code when it is read. It is still written
for torch's own tools; nothing here reads it.
"""

import json
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.storage import WriteResult

from titan_loop.checkpoint.manifest import TABLE, DamagedCheckpointError
from titan_loop.errors import UserError, first_line
from titan_loop.storage.file_names import require_file_name
from titan_loop.storage.json_files import (
    DamagedFileError,
    count,
    json_sha256,
    read_small,
    write_text,
)
from titan_loop.storage.transient import unreadable

_MOST_BYTES = 1 << 30  # about 60 bytes per tensor and rank are usual
_MOST_DIMENSIONS = 64  # torch's own limit


class TableWriter(filesystem.FileSystemWriter):
    """DCP's file system writer; on the coordinator, it also writes the table."""

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata` and the table of all ranks' entries."""
        super().finish(metadata, results)
        _write(Path(self.path), metadata)


def read_table(checkpoint: Path) -> dcp.Metadata:
    """Return DCP's description of a checkpoint, made from its table; `DamagedCheckpointError`.

    The chunks of a tensor must add up to its shape and fit their stored bytes, so that it is safe
    to allocate, and every file must be in the checkpoint's folder.
    """
    path = checkpoint / TABLE
    try:
        table = json.loads(read_small(path, fix="use another checkpoint", most_bytes=_MOST_BYTES))
        if table["sha256"] != json_sha256(table["entries"]):
            raise ValueError("it has a different SHA-256 than when it was written")
        return _parsed(table["entries"], path)
    except DamagedFileError as error:
        raise DamagedCheckpointError(path, error.reason) from error
    except UserError:
        raise
    except FileNotFoundError as error:
        raise DamagedCheckpointError(path, "it is missing") from error
    except OSError as error:
        raise unreadable(path, error, "check its disk and permissions") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(path, f"not a valid table ({first_line(error)})") from error
    except RecursionError as error:
        raise DamagedCheckpointError(path, "it is nested too deeply") from error


def _write(checkpoint: Path, metadata: dcp.Metadata) -> None:
    stored = {
        (index.fqn, index.offset): [info.relative_path, info.offset, info.length]
        for index, info in metadata.storage_data.items()
    }
    entries: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, dcp.BytesStorageMetadata):
            entries[key] = {"place": stored[key, None]}
            continue
        entries[key] = {
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "shape": entry.size,
            "chunks": [
                [chunk.offsets, chunk.sizes, *stored[key, chunk.offsets]] for chunk in entry.chunks
            ],
        }
    table = {"sha256": json_sha256(entries), "entries": entries}
    write_text(checkpoint / TABLE, json.dumps(table, separators=(",", ":")))


def _parsed(entries: dict[str, Any], path: Path) -> dcp.Metadata:
    """Return DCP's metadata; an impossible entry raises one of the errors `read_table` catches."""
    described: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
    stored: dict[dcp.MetadataIndex, filesystem._StorageInfo] = {}
    for key, entry in entries.items():
        if not key.isprintable():
            raise ValueError("the name of an entry is not printable text")
        if "place" in entry:
            described[key] = dcp.BytesStorageMetadata()
            stored[dcp.MetadataIndex(key)] = filesystem._StorageInfo(*entry["place"])
            continue
        dtype, shape = vars(torch)[entry["dtype"]], _shape(entry["shape"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{entry['dtype']} is not a dtype")
        chunks: list[dcp.ChunkStorageMetadata] = []
        for offsets, sizes, *place in entry["chunks"]:
            chunk = dcp.ChunkStorageMetadata(_shape(offsets), _shape(sizes))
            info = stored[dcp.MetadataIndex(key, chunk.offsets)] = filesystem._StorageInfo(*place)
            if prod(chunk.sizes) * dtype.itemsize > info.length or any(
                offset + size > whole
                for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)
            ):
                raise ValueError(f"a chunk of {key} exceeds its shape or its stored bytes")
            chunks.append(chunk)
        distinct = len({chunk.offsets for chunk in chunks}) == len(chunks)
        if not distinct or sum(prod(chunk.sizes) for chunk in chunks) != prod(shape):
            raise ValueError(f"{key} is incomplete")
        described[key] = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), shape, chunks)
    _check_places(stored.values(), path)
    return dcp.Metadata(described, storage_data=stored)


def _shape(value: list[Any]) -> torch.Size:
    if len(value) > _MOST_DIMENSIONS:
        raise ValueError(f"a shape has {len(value)} dimensions")
    return torch.Size(count(size) for size in value)


def _check_places(places: Iterable[filesystem._StorageInfo], path: Path) -> None:
    """Raise unless every entry lies in a file of the checkpoint, before that file's end."""
    ends: dict[str, int] = {}
    for place in places:
        name = require_file_name(place.relative_path, path)
        if not name.endswith(filesystem.DEFAULT_SUFFIX):
            raise ValueError(f"{name} holds no tensors")
        ends[name] = max(ends.get(name, 0), count(place.offset) + count(place.length))
    for name, end in ends.items():
        file = path.with_name(name)
        if file.exists() and end > (size := file.stat().st_size):  # readers report a missing one
            raise ValueError(f"{name} has {size} bytes, but its entries need {end}")
