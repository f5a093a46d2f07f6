"""Reads and writes safetensors, one tensor in memory at a time: one file, or shards with an index.

The library reads, and refuses truncated files. Its writer needs all tensors in memory, so this
module writes the format itself: the header's length in eight bytes, a JSON header with the type,
shape and place of every tensor, then the tensors.

Source: https://huggingface.co/docs/safetensors, "Format".
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titan_loop.errors import UserError
from titan_loop.storage.file_names import require_file_name
from titan_loop.storage.json_files import DamagedFileError, read_json_object, write_json

_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT_BYTES = 8
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_AGAIN = "download it again"


class SafetensorsFolder:
    """The tensors of a folder, by name.

    One file is open at a time, so reading in the order of `shapes` holds one shard in memory.
    Raises `UserError` if there are no safetensors, a file is missing or damaged, the index is
    wrong, or a tensor is not F32, BF16 or F16.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file, listed in self._files().items():
            with self._open(file) as opened:
                held = list(opened.keys())
                for name in held:
                    part = opened.get_slice(name)
                    if part.get_dtype() not in _TYPES.values():
                        raise UserError(
                            f"{folder / file}: {name} is {part.get_dtype()}; only F32, BF16 and "
                            "F16 weights can be imported"
                        )
                    self.shapes[name] = tuple(part.get_shape())
                    self._file_of[name] = file
            if listed is not None and (wrong := sorted(listed ^ {*held})):
                more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                raise UserError(
                    f"{folder / INDEX} and {file} disagree about {wrong[0]}{more}; download the "
                    "folder again"
                )
        self._current: tuple[str, Any] | None = None

    def read(self, name: str) -> Tensor:
        """Return a tensor as a view of the mapped file, read from disk only where it is used."""
        file = self._file_of[name]
        if self._current is None or self._current[0] != file:
            self.close()
            self._current = (file, self._open(file))
        return self._current[1].get_tensor(name)

    def close(self) -> None:
        """Close the open file, if any."""
        self._current = None

    def _files(self) -> dict[str, set[str] | None]:
        """Return the names that the index lists for each file (None without an index)."""
        index = self._folder / INDEX
        # Where both are there, transformers reads the one file.
        if (self._folder / SINGLE).is_file():
            return {SINGLE: None}
        if not index.is_file():
            raise UserError(
                f"{self._folder} has neither {SINGLE} nor {INDEX}; only safetensors are read"
            )
        placed = read_json_object(index, fix=_AGAIN).get("weight_map")
        if not isinstance(placed, dict) or not all(type(file) is str for file in placed.values()):
            raise DamagedFileError(index, "it has no weight_map with file names", _AGAIN)
        listed: dict[str, set[str]] = {}
        for name, file in placed.items():
            listed.setdefault(file, set()).add(name)
        for file in sorted(listed):
            require_file_name(file, index)
            if not (self._folder / file).is_file():
                raise UserError(f"{self._folder / file} is missing; download it, or export again")
        return {file: listed[file] for file in sorted(listed)}

    def _open(self, file: str) -> Any:
        try:
            return safe_open(str(self._folder / file), framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{self._folder / file} is damaged or incomplete ({error}); download it again"
            ) from error


def write_folder(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    read: Callable[[str], Tensor],
    *,
    max_shard_bytes: int,
    index: bool = False,
) -> None:
    """Write tensors to one file, or to shards with an index; one tensor in memory at a time.

    Args:
        dtype: float32 or bfloat16; a tensor of a wider type is rounded to nearest even.
        max_shard_bytes: Most tensor bytes in a file, unless a single tensor has more.
        index: Write an index even for a single file.
    """
    shards = _plan_shards(shapes, dtype, max_shard_bytes)
    single = len(shards) == 1 and not index
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / file, {name: shapes[name] for name in names}, dtype, read)
        weight_map.update(dict.fromkeys(names, file))
    if not single:
        total = sum(_bytes(shape, dtype) for shape in shapes.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _plan_shards(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_shard_bytes: int
) -> list[list[str]]:
    """Cut the tensors, in their order, into files of at most `max_shard_bytes`."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = _bytes(shape, dtype)
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _write_file(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    read: Callable[[str], Tensor],
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + _bytes(shape, dtype)
        header[name] = {"dtype": _TYPES[dtype], "shape": [*shape], "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, shape in shapes.items():
            tensor = read(name)
            assert tensor.shape == shape, (name, tensor.shape, shape)
            # The format is little-endian, and so is every machine that torch runs on.
            flat = tensor.to(dtype).contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)
            del tensor, flat  # before the next one is read
        file.flush()
        os.fsync(file.fileno())
