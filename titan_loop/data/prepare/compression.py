"""Files as bytes, whatever compressed them: the formats that fsspec knows by their suffix."""

import lzma
import sys
import zipfile
import zlib
from pathlib import PurePath
from typing import Any

import fsspec.utils
from fsspec.implementations.local import LocalFileSystem

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
    return fsspec.utils.infer_compression(name) is not None


def uncompressed_name(path: str) -> str:
    """Return a file's name without the suffix of its compression; "" for a .zip of many files."""
    if PurePath(path).suffix.lower() == ".zip":
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        return names[0] if len(names) == 1 else ""
    name = PurePath(path)
    return name.stem if is_compressed(name.name) else name.name


def open_file(path: str) -> Any:
    """Open a local file to read its bytes, decompressed."""
    return LocalFileSystem().open(path, "rb", compression="infer")
