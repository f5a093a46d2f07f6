"""Writes a safetensors file from tensors that are made one at a time.

The library's own writer wants all of them at once. The file is eight bytes (the header's length), a
JSON header with every tensor's type, shape and place, and the tensors.

Source: https://huggingface.co/docs/safetensors, "Format".
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_loop.errors import UserError

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT_BYTES = 8


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write a safetensors file, one tensor in memory at a time, and wait for the disk.

    Args:
        path: The file.
        tensors: Shape and type of each, in the order they are written.
        read: Returns one by name.
        metadata: Free text by name.

    Raises:
        UserError: safetensors has no such type.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (shape, dtype) in tensors.items():
        if dtype not in _TYPES:
            raise UserError(f"{name} has type {dtype}, which safetensors does not know")
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": _TYPES[dtype],
            "shape": [*shape],
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name in tensors:
            # Little-endian, like every machine torch runs on.
            flat = read(name).contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)
            del flat
        file.flush()
        os.fsync(file.fileno())
