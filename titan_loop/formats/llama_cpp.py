"""llama.cpp, where its wheel `xllamacpp` is installed: ids of texts, nats of rows, few bits."""

import ctypes
import json
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan_loop.errors import UserError

WHEEL = "xllamacpp==2026.10.11549"
_PROCESS = Path(__file__).with_name("llama_cpp_process.py")


def library() -> Path | None:
    """Return the wheel's library; None where it is not installed."""
    spec = find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("xllamacpp*.so"), None)


def require_library(what: str) -> Path:
    """Return the wheel's library; raise `UserError` where `what` needs it and it is missing."""
    found = library()
    if found is None:
        raise UserError(f"{what} needs llama.cpp's wheel: pip install {WHEEL}")
    return found


def encode(file: Path, texts: list[str]) -> list[list[int]]:
    """Return llama.cpp's ids of texts; raise `UserError` if it cannot load the file."""
    return _ask(file, {"texts": texts})


def nats(file: Path, rows: list[dict[str, list[int]]]) -> list[float]:
    """Return the nats of each row's `labels`, given its `ids`; a negative label counts nothing."""
    return _ask(file, {"rows": rows})


def _ask(file: Path, request: dict[str, Any]) -> Any:
    words = [sys.executable, "-P", str(_PROCESS), str(require_library(str(file))), str(file)]
    answer = subprocess.run(
        words, input=json.dumps(request), capture_output=True, text=True, check=False
    )
    if answer.returncode:
        said = [line for line in answer.stderr.splitlines() if line.strip()]
        raise UserError(f"llama.cpp cannot run {file}: {' '.join(said[-2:])}")
    return json.loads(answer.stdout)


@cache
def _quantiser() -> Any:
    loaded = ctypes.CDLL(str(require_library("a type of a few bits")))
    loaded.ggml_quantize_chunk.restype = ctypes.c_size_t
    return loaded.ggml_quantize_chunk


def quantise(matrix: NDArray[np.float32], kind: int) -> NDArray[np.uint8]:
    """Return the blocks of a matrix's rows.

    Args:
        matrix: (rows, columns), contiguous; columns are a multiple of the type's block.
        kind: ggml's number of the type.
    """
    import gguf

    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    rows, columns = matrix.shape
    blocks = np.empty((rows, columns // sizes[0] * sizes[1]), dtype=np.uint8)
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (matrix, blocks))
    sizes_ = (ctypes.c_int64(0), ctypes.c_int64(rows), ctypes.c_int64(columns))
    written = _quantiser()(ctypes.c_int(kind), *pointers, *sizes_, None)
    assert written == blocks.nbytes, (written, blocks.nbytes)
    return blocks
