"""A checkpoint's full tensors in one safetensors file, for other programs to read.

One tensor is in memory at a time.
"""

import json
from pathlib import Path

from titan_loop.checkpoint.loading import OPTIMIZER_PREFIX
from titan_loop.checkpoint.manifest import reference
from titan_loop.checkpoint.safetensors_files import write_safetensors
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.storage.staged_folder import staged_file


def consolidate(reader: CheckpointReader, output: Path, *, optimizer: bool = False) -> list[str]:
    """Write full tensors to one file, whole or not at all, and return their keys.

    The file's metadata hold the checkpoint's origin as JSON under `titan_loop.*`. Raises
    `UserError` if `output` exists or a tensor has a type that safetensors does not know.
    """
    keys = [
        key for key in reader.tensor_keys() if optimizer or not key.startswith(OPTIMIZER_PREFIX)
    ]
    keys.sort(key=lambda key: (-reader.dtype(key).itemsize, key))  # widest first: all stay aligned
    announced = {key: (reader.shape(key), reader.dtype(key)) for key in keys}
    record = {
        "manifest_sha256": reference(reader.checkpoint)["manifest_sha256"],
        **{name: reader.manifest[name] for name in ("step", "trainer", "data", "lineage")},
    }
    origin = {f"titan_loop.{name}": json.dumps(value) for name, value in record.items()}
    with staged_file(output) as unfinished:
        write_safetensors(unfinished, announced, reader.read, {"format": "pt", **origin})
    return keys
