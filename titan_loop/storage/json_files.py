"""Small files that survive the death of their writer: atomic JSON and text, append-only lines."""

import codecs
import hashlib
import json
import logging
import math
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_loop.errors import UserError
from titan_loop.storage.regular_file import DamagedFileError, read_regular
from titan_loop.storage.transient import retried

logger = logging.getLogger(__name__)


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a JSON file; a reader sees the old content or the new, never a part."""
    text = json.dumps(finite_or_null(record), indent=2, ensure_ascii=False, allow_nan=False)
    # Half a surrogate pair, from a name that is not UTF-8, becomes its JSON escape.
    write_text(path, (text + "\n").encode(errors="backslashreplace").decode())


def write_text(path: Path, text: str) -> None:
    """Write a text file as `write_json` does: a reader sees the old content or the new."""
    retried(lambda: _write_text(path, text))


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    temporary.unlink(missing_ok=True)  # of a killed process with the same number, as in containers
    try:
        # Not mkstemp, whose files are private to the user: these follow the umask.
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
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
    """Return the JSON value in a file; raises as `read_regular` does."""
    content = read_regular(path, fix=fix)
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
    for number, line in enumerate(_lines(path), start=1):
        try:
            record = _parse(line)
            if not isinstance(record, dict):
                raise ValueError("not a JSON object")
        except ValueError as error:
            if not line.endswith(b"\n"):
                logger.warning("%s: skipped an incomplete last line (%d bytes)", path, len(line))
                break
            raise _wrong_line(path, number, f"is not JSON ({error})") from error
        for name, kind in (fields or {}).items():
            if type(value := record.get(name)) is not kind:
                instead = f"has {name}={value!r} instead of {kind.__name__}"
                raise _wrong_line(path, number, instead)
        records.append(record)
    return records


def _lines(path: Path) -> Iterator[bytes]:
    with suppress(FileNotFoundError), path.open("rb") as file:
        yield from file


def _wrong_line(path: Path, number: int, problem: str) -> UserError:
    return UserError(f"{str(path)!r} line {number} {problem}; remove that line to read the rest")


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
