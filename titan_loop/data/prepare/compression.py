"""Files as bytes, whatever compressed them: the formats that fsspec knows by their suffix.

fsspec is imported when the first file is opened: `--help` opens none.
"""

import io
import lzma
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from titan_loop.errors import UserError, first_line

# Without this module fsspec opens .zst files with one that reads only the first frame, and takes a
# cut-off file for a whole one.
if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BROKEN = (EOFError, OSError, zlib.error, lzma.LZMAError, zstd.ZstdError, zipfile.BadZipFile)
"""Exceptions of files that cannot be read to their end."""


def is_compressed(name: str) -> bool:
    """Return whether a file's name says that it is compressed."""
    from fsspec.utils import infer_compression

    return infer_compression(name) is not None


def uncompressed_name(path: str) -> str:
    """Return a file's name without the suffix of its compression; "" for a .zip of many files."""
    if PurePath(path).suffix.lower() == ".zip":
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        return names[0] if len(names) == 1 else ""
    name = PurePath(path)
    return name.stem if is_compressed(name.name) else name.name


def open_file(path: str) -> Any:
    """Open a local file to read its bytes and lines, decompressed."""
    from fsspec.implementations.local import LocalFileSystem

    try:
        file: Any = LocalFileSystem().open(path, "rb", compression="infer")
    except RuntimeError as error:  # an encrypted .zip, or one of a method that Python lacks
        raise zipfile.BadZipFile(str(error)) from error
    # Some decompressors read bytes alone.
    return file if hasattr(file, "readline") else io.BufferedReader(file)


def file_lines(path: str) -> Iterator[bytes]:
    """Yield the lines of a file; raise `UserError` for one that cannot be read to its end."""
    try:
        with open_file(path) as file:
            while line := file.readline():
                yield line
    except BROKEN as error:
        raise unreadable(path, error) from error


def unreadable(path: str, error: Exception) -> UserError:
    """Return the error of a file that cannot be read to its end."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
    return UserError(f"input {path} cannot be read to its end ({reason}): replace it")
