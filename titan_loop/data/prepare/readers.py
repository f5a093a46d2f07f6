"""The reader of documents for datatrove, which counts every record that does not become one.

datatrove's own readers drop records without text without a count and abandon a file at its first
invalid byte. Importing this module switches off datatrove's log, in processes of tasks, too.
"""

import codecs
import csv
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import loguru
from datatrove.data import Document
from datatrove.pipeline.readers.base import BaseDiskReader

from titan_loop.data.prepare.chat_records import ChatRecords, without_nulls
from titan_loop.data.prepare.file_kinds import BROKEN, InputFile, file_lines, unreadable
from titan_loop.data.prepare.json_records import (
    HALF_SURROGATE,
    LENIENT,
    Parsed,
    parse_json,
    parse_values,
)
from titan_loop.data.prepare.tables import table_rows
from titan_loop.errors import UserError
from titan_loop.text.conversation import RejectedError
from titan_loop.text.tokenizer import TURN_START

logger = logging.getLogger(__name__)
loguru.logger.disable("datatrove")  # it has a banner and a drawing per task

_SHOWN_EXAMPLES = 3
_SHOWN_FIELDS = 8
DROPPED_BY_READERS = ("malformed", "missing_text", "empty", "rejected")
"""Lines that are not records, records without the field, without text, and with a bad answer."""
REPAIRED_BY_READERS = (LENIENT, HALF_SURROGATE)
_EXAMPLE = "example: "
"""Beginning of the name of a statistic that tells of a dropped record."""
SPELT_CHATML = "spelt_chatml"
"""Statistic of documents whose text spells the token that begins a turn."""

Records = Iterator[tuple[int, dict[str, Any] | str]]
"""The number of every record of a file, and its fields, or its fault if it is malformed."""

_PLACES = {"jsonl": "line", "json": "record", "text": "document"}


class FileReader(BaseDiskReader):
    """Reads files, of which `kinds` gives the kinds; a bad line costs that record only.

    A record becomes a document or is counted as dropped. Its statistics are `records`, the reasons
    in `DROPPED_BY_READERS`, the repairs in `REPAIRED_BY_READERS`, and the first few dropped records
    of a task, in words. With `chat`, records are conversations.
    """

    name = "📄 Files"

    def __init__(
        self,
        *args: Any,
        chat: ChatRecords | None,
        kinds: Mapping[str, str],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.chat = chat
        self.kinds = kinds
        self.shown = 0

    def get_document_from_dict(
        self, data: Mapping[str, Any], source_file: str, id_in_file: int | str
    ) -> Document | None:
        """Return the record's document; if there is none, count the reason."""
        metadata: dict[str, Any] = {"file_path": source_file}
        try:
            if self.chat is not None:
                text, conversation = self.chat.read(data)
                metadata |= conversation
            else:
                text = _text(data, self.text_key)
                if TURN_START in text:
                    self.stat_update(SPELT_CHATML)
        except KeyError as error:
            return self.drop("missing_text", source_file, id_in_file, str(error.args[0]))
        except TypeError as error:
            return self.drop("malformed", source_file, id_in_file, str(error))
        except RejectedError as error:
            return self.drop("rejected", source_file, id_in_file, str(error))
        except ValueError as error:
            return self.drop("empty", source_file, id_in_file, str(error))
        return Document(text=text, id=f"{source_file}/{id_in_file}", metadata=metadata)

    def drop(self, kind: str, source_file: str, id_in_file: int | str, reason: str) -> None:
        """Count a dropped record; keep the task's first few as examples."""
        self.stat_update(kind)
        if self.shown < _SHOWN_EXAMPLES:
            self.shown += 1
            place = _PLACES.get(self.kinds[source_file.removeprefix("/")], "row")
            self.stat_update(f"{_EXAMPLE}{source_file}, {place} {id_in_file}: {reason}")

    def read_file(self, filepath: str) -> Generator[Document, None, None]:
        """Yield the documents of one file."""
        path = f"/{filepath}"
        for number, record in self.read_records(filepath):
            self.stat_update("records")
            if isinstance(record, str):
                self.drop("malformed", path, number, record)
            elif document := self.get_document_from_dict(record, path, number):
                yield document

    def read_records(self, filepath: str) -> Records:
        """Return the records of one file; lines and rows are numbered from 1."""
        path = f"/{filepath}"
        match self.kinds[filepath]:
            case "jsonl":
                return self._json_lines(path)
            case "json":
                return self._json_values(path)
            case "text":
                return self._text_file(path)
            case kind:
                return self._table(path, kind)

    def _json_lines(self, path: str) -> Records:
        for number, line in enumerate(file_lines(path), start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                yield number, _object(self._repaired(parse_json(line.rstrip())))
            except ValueError as error:
                yield number, str(error)

    def _json_values(self, path: str) -> Records:
        content = b"".join(file_lines(path))
        try:
            for number, parsed in enumerate(parse_values(content), start=1):
                yield number, _object(self._repaired(parsed))
        except ValueError as error:
            raise UserError(
                f"input {path} cannot be read ({error}): correct it, or give --format text to "
                "train on its letters"
            ) from error

    def _text_file(self, path: str) -> Records:
        content = b"".join(file_lines(path)).removeprefix(codecs.BOM_UTF8)
        try:
            yield 1, {self.text_key: content.decode()}
        except UnicodeDecodeError as error:
            yield 1, f"invalid UTF-8 ({error.reason})"

    def _table(self, path: str, kind: str) -> Records:
        import pyarrow

        wanted = (self.text_key,) if self.chat is None else self.chat.fields
        try:
            rows = table_rows(path, kind, wanted)
            if self.chat is not None:
                rows = map(without_nulls, rows)
            yield from enumerate(rows, start=1)
        except UserError:
            raise
        except (pyarrow.ArrowException, csv.Error, ValueError, MemoryError, *BROKEN) as error:
            raise unreadable(path, error) from error

    def _repaired(self, parsed: Parsed) -> Any:
        for repair in parsed.repairs:
            self.stat_update(repair)
        return parsed.value


def _text(record: Mapping[str, Any], key: str) -> str:
    text = record.get(key)
    if text is None:
        if key in record:
            raise KeyError(f"{key!r} is null")
        raise KeyError(f"no field {key!r}{_only(record)}")
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError:
            raise TypeError("invalid UTF-8") from None
    if not isinstance(text, str):
        raise TypeError(f"{key!r} is not a string")
    if not text.strip():
        raise ValueError("no text")
    return text


def report_dropped(
    called: str, counts: Mapping[str, int], most: float, reasons: Mapping[str, int]
) -> None:
    """Warn about dropped records, by reason, with examples.

    Raises `UserError` if more than a share `most` of the records are malformed or lack their text.
    """
    named = (name.removeprefix(_EXAMPLE) for name in counts if name.startswith(_EXAMPLE))
    examples = [*islice(named, _SHOWN_EXAMPLES)]
    bad = counts["malformed"] + counts["missing_text"]
    if bad > most * counts["records"]:
        raise UserError(
            f"inputs: {bad} of {counts['records']} records are malformed or lack their text, more "
            f"than --max-malformed {most:g} allows; {'; '.join(examples)}"
        )
    if reasons:
        summary = ", ".join(f"{count} {name}" for name, count in reasons.items())
        logger.warning("%s: dropped %s of %d records", called, summary, counts["records"])
        for example in examples:
            logger.warning("dropped %s", example)


def document_reader(
    files: Sequence[InputFile], *, paths_file: Path, text_key: str, chat: ChatRecords | None
) -> FileReader:
    """Return the reader for these files."""
    kinds = {file.path.lstrip("/"): file.kind for file in files}
    paths_file.parent.mkdir(parents=True, exist_ok=True)
    paths_file.write_text("".join(f"{path}\n" for path in kinds))
    options: dict[str, Any] = {"text_key": text_key, "chat": chat, "kinds": kinds}
    return FileReader("/", paths_file=str(paths_file), **options)


def _object(record: Any) -> dict[str, Any] | str:
    return record if isinstance(record, dict) else "not a JSON object"


def _only(record: Mapping[str, Any]) -> str:
    """Return the names that a record has, to go after the one that it lacks."""
    names = ", ".join(repr(name) for name in [*record][:_SHOWN_FIELDS])
    more = f" and {len(record) - _SHOWN_FIELDS} more" if len(record) > _SHOWN_FIELDS else ""
    return f", only {names:.200}{more}" if names else ""
