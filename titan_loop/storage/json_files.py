"""Small files that survive being killed: atomic JSON and text, append-only lines."""

import json
import logging
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_loop.errors import UserError

logger = logging.getLogger(__name__)


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a JSON file so that a reader sees the old content or the new, never a part.

    Args:
        path: Where; missing parent folders are created.
        record: What; non-finite numbers become null.

    Raises:
        OSError: If the folder cannot be written.
    """
    text = json.dumps(finite_or_null(record), indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file as `write_json` does: a reader sees the old content or the new.

    Raises:
        OSError: If the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        # Opened, not made by mkstemp, which would be private to the user: files follow the umask.
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_versioned_json(path: Path, *, format_version: int, fix: str) -> dict[str, Any]:
    """Return a JSON object whose `format_version` this program knows.

    Args:
        path: The file.
        format_version: The newest version that is known.
        fix: Remedy for a damaged file, for the message.

    Raises:
        FileNotFoundError: The file does not exist.
        UserError: The file is not such an object, or has a newer version.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        version = int(record["format_version"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); {fix}") from error
    if version > format_version:
        raise UserError(
            f"{path} has format version {version}, this titan_loop reads up to {format_version}; "
            "upgrade it"
        )
    return record


def append_jsonl(path: Path, record: Mapping[str, Any]) -> None:
    """Append one record as one line; non-finite numbers become null.

    Half a line that a killed process left at the end is removed first, with a warning, since the
    new record would be glued to it.
    """
    line = json.dumps(finite_or_null(record), ensure_ascii=False, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                whole = file.read().rfind(b"\n") + 1
                file.truncate(whole)
                logger.warning("%s: removed an incomplete last line (%d bytes)", path, end - whole)
        file.write(line.encode())


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the records of a `.jsonl` file; none if it does not exist.

    Raises:
        UserError: If a line other than an incomplete last one is not JSON.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    incomplete = lines.pop()
    if incomplete:
        logger.warning("%s: skipped an incomplete last line (%d bytes)", path, len(incomplete))
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(
                f"{str(path)!r} line {number} is not JSON; remove that line to read the rest"
            ) from error
    return records


def finite_or_null(value: Any) -> Any:
    """Return `value` with every non-finite number replaced by None, since JSON has none of them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_or_null(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_null(item) for item in value]
    return value
