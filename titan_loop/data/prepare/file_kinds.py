"""The contents of a file, by its name and first bytes: records, text, or nothing to learn from.

name ends in .jsonl, .csv, .parquet, …       that kind, below any compression
name ends in .json                           JSON lines, or JSON values: the first line decides
Parquet's or Arrow's mark                    that kind, under any name
first line is a JSON object                  JSON lines, under any name
bytes of 0, archives, notebooks, unfinished  not read
a pointer of Git LFS                         refused under a name of records, else not read
anything else                                text
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from titan_loop.data.prepare.compression import (
    BROKEN,
    is_compressed,
    open_file,
    uncompressed_name,
)
from titan_loop.data.prepare.json_records import parse_json
from titan_loop.errors import UserError

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
    r"(readme|licen[cs]e|copying|notice|citation|changelog|authors)([._-].*)?", re.IGNORECASE
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
        if _is_pointer(path):
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


def _is_pointer(path: Path) -> bool:
    return path.stat().st_size <= _LONGEST_POINTER and path.read_bytes().startswith(_POINTER)


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
