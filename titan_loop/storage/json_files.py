"""Small files that survive the death of their writer: atomic JSON and text, append-only lines."""

import codecs
import errno
import hashlib
import json
import logging
import math
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from titan_loop.errors import UserError
from titan_loop.storage.transient import ShortReadError, retried

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 26
"""Largest size of a small file; a manifest of 4,096 ranks has half a megabyte."""

_NOT_THE_FILE = {errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG}


class DamagedFileError(UserError):
    """A file does not have the content that its name promises; `fix` ends the message."""

    def __init__(self, path: Path, reason: str, fix: str) -> None:
        super().__init__(path, reason, fix)  # all three, so that ranks can pickle it
        self.path = path
        self.reason = reason
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.path} is damaged ({self.reason}); {self.fix}"


def read_small(path: Path, *, fix: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a small file, tried again after a transient error or a short read.

    Raises `FileNotFoundError` if it does not exist, `DamagedFileError` if it is not a file of at
    most `most_bytes`, `UserError` if it may not be read, and `OSError` if the disk fails.
    """

    def read() -> bytes:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > most_bytes:
                raise DamagedFileError(path, f"more than {most_bytes} bytes", fix)
            content = file.read(most_bytes)
            if len(content) < size:
                raise ShortReadError(path, f"only {len(content)} bytes were read")
            return content

    try:
        return retried(read)
    except PermissionError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); change its mode") from error
    except OSError as error:
        if error.errno not in _NOT_THE_FILE:
            raise
        raise DamagedFileError(path, str(error.strerror), fix) from error


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a JSON file; a reader sees the old content or the new, never a part."""
    text = json.dumps(finite_or_null(record), indent=2, ensure_ascii=False, allow_nan=False)
    # Half a surrogate pair, from a name that is not UTF-8, becomes its JSON escape.
    write_bytes(path, (text + "\n").encode(errors="backslashreplace"))


def write_text(path: Path, text: str) -> None:
    """Write a text file as `write_json` does: a reader sees the old content or the new."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file as `write_text` does."""
    retried(lambda: _write_bytes(path, content))


def _write_bytes(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    temporary.unlink(missing_ok=True)  # of a killed process with the same number, as in containers
    try:
        # Not mkstemp, whose files are private to the user: these follow the umask.
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_to_disk([path.parent])


def sync_to_disk(paths: Iterable[Path]) -> None:
    """Wait until the disk has the content of files, or the names in folders."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_json(path: Path, *, fix: str) -> Any:
    """Return the JSON value in a file; raises as `read_small` does."""
    content = read_small(path, fix=fix)
    try:
        return _parse(content)
    except ValueError as error:
        raise DamagedFileError(path, str(error), fix) from error


def read_json_object(path: Path, *, fix: str) -> dict[str, Any]:
    """Return the JSON object in a file; raises as `read_json` does, also for any other value."""
    record = read_json(path, fix=fix)
    if not isinstance(record, dict):
        raise DamagedFileError(path, "not a JSON object", fix)
    return record


def read_versioned_json(path: Path, *, format_version: int, fix: str) -> dict[str, Any]:
    """Return a JSON object; raises as `read_json` does, and `UserError` for a newer version."""
    record = read_json_object(path, fix=fix)
    version = record.get("format_version")
    if type(version) is not int:
        raise DamagedFileError(path, f"format_version={version!r} is not a number", fix)
    if version > format_version:
        raise UserError(
            f"{path} has format version {version}, this titan_loop reads up to {format_version}; "
            "upgrade titan_loop"
        )
    return record


def append_jsonl(path: Path, record: Mapping[str, Any]) -> None:
    """Append one record as one line; non-finite numbers become null.

    Half a line at the end, from a killed process, is removed first, with a warning.
    """
    line = json.dumps(finite_or_null(record), ensure_ascii=False, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if end := file.seek(0, os.SEEK_END):
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                whole = file.read().rfind(b"\n") + 1
                file.truncate(whole)
                logger.warning("%s: removed an incomplete last line (%d bytes)", path, end - whole)
        file.write(line.encode(errors="backslashreplace"))


def read_jsonl(path: Path, fields: Mapping[str, type] | None = None) -> list[dict[str, Any]]:
    """Return the records of a `.jsonl` file; none if it does not exist.

    `fields` are names that every record has, and the types of their values. An incomplete last line
    is skipped; any other line that is not such a record raises `UserError`.
    """
    records: list[dict[str, Any]] = []
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = _parse(line)
            if not isinstance(record, dict):
                raise ValueError("not a JSON object")
            for name, kind in (fields or {}).items():
                if type(value := record.get(name)) is not kind:
                    raise ValueError(f"{name}={value!r} instead of {kind.__name__}")
        except ValueError as error:
            if not line.endswith(b"\n"):
                logger.warning("%s: skipped an incomplete last line (%d bytes)", path, len(line))
                break
            raise UserError(
                f"{str(path)!r} line {number} cannot be read ({error}); remove that line to read "
                "the rest"
            ) from error
        records.append(record)
    return records


def nested(record: Mapping[str, Any], name: str) -> Any:
    """Return the value at a dotted name in nested objects; None if there is none."""
    value: Any = record
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def number(value: Any) -> float:
    """Return a number of a JSON file, NaN for null; raise `TypeError` for anything else."""
    if value is None:
        return math.nan
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise TypeError(f"{value!r:.40} is not a number")
    return value


def count(value: Any) -> int:
    """Return a whole number of at least 0; raise `TypeError` for anything else."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise TypeError(f"{value!r:.40} is not a number from 0 on")
    return value


def finite_or_null(value: Any) -> Any:
    """Return `value` with every non-finite number replaced by None, since JSON has none of them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_or_null(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_null(item) for item in value]
    return value


def json_sha256(value: Any) -> str:
    """Return the SHA-256 of a JSON value, however a file spells it."""
    return hashlib.sha256(json.dumps(finite_or_null(value), sort_keys=True).encode()).hexdigest()


def _parse(content: bytes) -> Any:
    """Return a JSON value; raise `ValueError` if it is not JSON."""
    try:
        return json.loads(content.removeprefix(codecs.BOM_UTF8).decode())
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
