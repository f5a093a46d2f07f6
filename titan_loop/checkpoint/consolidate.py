"""A checkpoint's full tensors in one safetensors file, for other programs to read.

One tensor is in memory at a time.
"""

import json
import os
from pathlib import Path

from titan_loop.checkpoint.loading import OPTIMIZER_PREFIX
from titan_loop.checkpoint.manifest import reference
from titan_loop.checkpoint.safetensors_files import write_safetensors
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.errors import UserError


def consolidate(reader: CheckpointReader, output: Path, *, optimizer: bool = False) -> list[str]:
    """Write full tensors to one file; it appears under its name when it is complete.

    Returns:
        The tensors written.

    Raises:
        UserError: `output` exists, or a tensor has a type that safetensors does not know.
        OSError: It cannot be written.
    """
    if output.exists():
        raise UserError(f"output={output} exists; choose another file, or delete it")
    keys = [
        key for key in reader.tensor_keys() if optimizer or not key.startswith(OPTIMIZER_PREFIX)
    ]
    keys.sort(key=lambda key: (-reader.dtype(key).itemsize, key))  # keeps tensors aligned
    announced = {key: (tuple(reader.shape(key)), reader.dtype(key)) for key in keys}
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f".{output.name}.unfinished")
    try:
        write_safetensors(unfinished, announced, reader.read, lineage_of(reader))
        os.replace(unfinished, output)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return keys


def lineage_of(reader: CheckpointReader) -> dict[str, str]:
    """Return where a checkpoint comes from, as safetensors metadata: text by name, JSON in it."""
    manifest = reader.manifest
    record = {
        "manifest_sha256": reference(reader.checkpoint)["manifest_sha256"],
        "step": manifest["step"],
        "trainer": manifest["trainer"],
        "data": manifest["data"],
        "lineage": manifest["lineage"],
    }
    return {"format": "pt", **{f"titan_loop.{k}": json.dumps(v) for k, v in record.items()}}
