"""The contents of a file, decompressed, by its name and first bytes: records, text, or neither.

name ends in .jsonl, .csv, .parquet, …       that kind, below any compression that fsspec knows
name ends in .json                           JSON lines, or JSON values: the first line decides
Parquet's or Arrow's mark                    that kind, under any name
first line is a JSON object                  JSON lines, under any name
bytes of 0, archives, notebooks, unfinished  not read
a pointer of Git LFS                         refused under a name of records, else not read
anything else                                text

fsspec is imported when the first file is opened: `--help` opens none.
"""

import io
import json
import lzma
import re
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from titan_loop.data.prepare.json_records import parse_json
from titan_loop.errors import UserError, first_line

# Without this module fsspec opens .zst files with one that reads only the first frame, and takes a
# cut-off file for a whole one.
if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BROKEN = (EOFError, OSError, zlib.error, lzma.LZMAError, zstd.ZstdError, zipfile.BadZipFile)
"""Exceptions of files that cannot be read to their end."""

RECORDS = ("jsonl", "json", "csv", "tsv", "parquet", "arrow")
TEXT = "text"
"""Kinds of files that hold documents: records, or one document."""

SIDE, ABOUT, OTHER = "side", "about", "other"
"""Files that are no documents: of a machine, about the data beside them, and not readable."""

_BY_SUFFIX: dict[str, str] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".parq": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_SIDE_NAME = re.compile(
    r"_(SUCCESS|metadata|common_metadata|started_\d+|committed_\d+)|(md5|sha\d+)sums?(\.txt)?"
    r"|dataset_(infos?|dict)\.json|cache-.*\.arrow|.*\.(crc|md5|sha1|sha256|sha512|sig|asc|lock)",
    re.IGNORECASE,
)
_SIDE_FOLDERS = {"_delta_log", "_temporary", "__MACOSX"}
_ABOUT_NAME = re.compile(
    r"(?!.*\.(?:jsonl|ndjson|[ct]sv|parquet|parq|pq|arrow|feather)\b)"  # records of readmes, say
    r"(readme|licen[cs]e|copying|notice|citation|changelog|authors)([._-].*)?",
    re.IGNORECASE,
)
_NOT_READ = {".ipynb", ".tmp", ".part", ".incomplete", ".crdownload", ".bak", ".orig", ".swp"}
_POINTER, _LONGEST_POINTER = b"version https://git-lfs.github.com/spec/", 1024
_WEB_ARCHIVE = b"WARC/"
_SAYS_NOTHING = re.compile(r"|\.(txt|old|\d+)")
_HEAD_BYTES = 1 << 12
_SHOWN_ENDINGS = 5
_LONGEST_FIRST_LINE = 1 << 26


class InputFile(NamedTuple):
    """A file to read, by its absolute path, and its kind: TEXT or one of RECORDS."""

    path: str
    kind: str


def kind_of(path: Path, folder: Path) -> str:
    """Return the kind of a file below a folder: TEXT, one of RECORDS, or SIDE, ABOUT, OTHER."""
    below = path.relative_to(folder).parts
    if _SIDE_NAME.fullmatch(path.name) or not _SIDE_FOLDERS.isdisjoint(below):
        return SIDE
    if path.name == "state.json" and any(path.parent.glob("*.arrow")):
        return SIDE
    if path.suffix == ".arrow" and path.name not in _saved_files(path.parent, path.name):
        return SIDE  # a cache beside the files that `datasets` saved
    if _ABOUT_NAME.fullmatch(path.name):
        return ABOUT
    return contents_of(path)


def contents_of(path: Path) -> str:
    """Return the kind of a file that is data, whatever it is called: TEXT, RECORDS or OTHER."""
    known = ""
    try:
        name = PurePath(uncompressed_name(str(path)))
        suffix = name.suffix.lower()
        known = _BY_SUFFIX.get(suffix, "")
        if not name.name or suffix in _NOT_READ or path.name.endswith("~"):
            return OTHER
        if path.stat().st_size <= _LONGEST_POINTER and path.read_bytes().startswith(_POINTER):
            if not known:
                return OTHER
            raise UserError(f"input {path} is only Git LFS's pointer to a file: run git lfs pull")
        if known and known != "json":
            return known
        if found := _by_first_bytes(path):
            return found
    except BROKEN:
        return known or TEXT  # its reader says why it cannot be read
    if known:
        return known
    inner = {f".{part}" for part in name.stem.lower().split(".")[1:]}
    is_renamed = bool(_SAYS_NOTHING.fullmatch(suffix) and inner & set(_BY_SUFFIX))  # a.csv.txt
    return OTHER if is_renamed else TEXT


def by_ending(paths: Iterable[Path]) -> str:
    """Return how many files end in which suffix, most first, e.g. "3 .txt, 1 .npy, 2 others"."""
    counts = Counter(_ending(path) for path in paths).most_common()
    shown = [f"{count} {ending}" for ending, count in counts[:_SHOWN_ENDINGS]]
    rest = sum(count for _, count in counts[_SHOWN_ENDINGS:])
    return ", ".join([*shown, f"{rest} others"] if rest else shown)


def _ending(path: Path) -> str:
    suffixes = path.suffixes[-2:] if is_compressed(path.name) else path.suffixes[-1:]
    return "".join(suffixes).lower() or path.name


def _by_first_bytes(path: Path) -> str:
    with open_file(str(path)) as file:
        head = file.read(_HEAD_BYTES)
        if head.startswith(b"PAR1"):
            return "parquet"
        if head.startswith(b"ARROW1"):
            return "arrow"
        if b"\0" in head or head.startswith(_WEB_ARCHIVE):
            return OTHER
        return "jsonl" if _first_line_is_object(head, file) else ""


def _first_line_is_object(head: bytes, file: Any) -> bool:
    line = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not line.startswith(b"{"):
        return False
    if b"\n" not in line and len(head) == _HEAD_BYTES:
        line += file.readline(_LONGEST_FIRST_LINE)
    try:
        return bool(parse_json(line.partition(b"\n")[0].strip()).value)
    except ValueError:
        return False


def _saved_files(folder: Path, otherwise: str) -> set[str]:
    """Return the names of the files of a folder that `save_to_disk` of `datasets` wrote."""
    try:
        state = json.loads((folder / "state.json").read_bytes())
        return {each["filename"] for each in state["_data_files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {otherwise}


# Files as bytes, whatever compressed them.


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
