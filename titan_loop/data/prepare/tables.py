"""Rows of tables: Parquet and Arrow through pyarrow, CSV and TSV through Python's `csv`.

pyarrow's CSV reader ends a file at a row that has too many columns and is not UTF-8.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from titan_loop.data.prepare.file_kinds import file_lines, open_file
from titan_loop.data.prepare.json_records import parse_json

if TYPE_CHECKING:
    import pyarrow

NOT_UTF8 = b"\xff"
"""The value of a cell that should be text and is not UTF-8."""

_BATCH_ROWS = 1000
_LONGEST_CELL = 1 << 28


def table_rows(path: str, kind: str, wanted: Sequence[str]) -> Iterator[dict[str, Any] | str]:
    """Yield the rows of a file, or the fault of a row that cannot be split into columns.

    A table without any wanted column gives rows with all its columns, as None.

    Args:
        kind: "parquet", "arrow", "csv" or "tsv".
        wanted: The columns to read, of which a table may lack some.

    Raises:
        pyarrow.ArrowException, csv.Error or ValueError: If the file is not such a table.
    """
    if kind in ("csv", "tsv"):
        yield from _csv_rows(path, wanted, tabs=kind == "tsv")
        return
    with open_file(path) as file:
        names, batches = (_parquet if kind == "parquet" else _arrow)(file)
        read = _columns(names, wanted)
        for batch in batches(read or names[:1]):
            if not read:
                yield from (dict.fromkeys(names) for _ in range(batch.num_rows))
                continue
            columns = [_cells(column) for column in batch.columns]
            for cells in zip(*columns, strict=True):
                yield dict(zip(batch.schema.names, cells, strict=True))


Batches = tuple[list[str], "Callable[[list[str]], Iterator[pyarrow.RecordBatch]]"]
"""Names of all columns, and what returns some of them, some rows at a time."""


def _parquet(file: Any) -> Batches:
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file)
    return table.schema_arrow.names, lambda read: table.iter_batches(_BATCH_ROWS, columns=read)


def _arrow(file: Any) -> Batches:
    import pyarrow

    try:
        reader = pyarrow.ipc.open_file(file)
        every = (reader.get_batch(number) for number in range(reader.num_record_batches))
    except pyarrow.ArrowInvalid:  # `datasets` writes streams
        file.seek(0)
        every = reader = pyarrow.ipc.open_stream(file)

    def batches(read: list[str]) -> "Iterator[pyarrow.RecordBatch]":
        for batch in every:
            chosen = batch.select(read)
            chosen.validate(full=True)  # a damaged file has offsets that lead out of its memory
            yield chosen

    return reader.schema.names, batches


def _csv_rows(path: str, wanted: Sequence[str], *, tabs: bool) -> Iterator[dict[str, Any] | str]:
    csv.field_size_limit(_LONGEST_CELL)
    # A cell that is not UTF-8 must not end the file.
    lines = (line.decode(errors="surrogateescape") for line in file_lines(path))
    first = next(lines, "").removeprefix("\ufeff")
    # Spreadsheets of many countries separate by semicolons.
    delimiter = "\t" if tabs else max(",;\t", key=first.count)
    # Otherwise a quote that is not closed takes the rows behind it into its cell, in silence.
    rows = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
    names = next(rows, [])
    read = _columns(names, wanted)
    for cells in _each_row(rows):
        if isinstance(cells, str):
            yield cells
        elif cells and len(cells) != len(names):
            yield f"{len(cells)} columns instead of {len(names)}"
        elif cells and not read:
            yield dict.fromkeys(names)
        elif cells:
            row = dict(zip(names, cells, strict=True))
            yield {name: row[name] if _is_utf8(row[name]) else NOT_UTF8 for name in read}


def _each_row(rows: Iterator[list[str]]) -> Iterator[list[str] | str]:
    while True:
        try:
            yield next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"quotes are not as in CSV ({error})"


def _is_utf8(text: str) -> bool:
    return text.isascii() or text.encode(errors="replace").decode() == text


def _columns(names: list[str], wanted: Sequence[str]) -> list[str]:
    read = [name for name in names if name in wanted]
    if twice := next((name for name in read if read.count(name) > 1), None):
        raise ValueError(f"several columns are called {twice!r}")
    return read


def _cells(column: "pyarrow.Array") -> list[Any]:
    import pyarrow

    if isinstance(column.type, pyarrow.JsonType):
        return [_json(cell) for cell in column.to_pylist()]
    try:
        cells = column.to_pylist()
    except ValueError:  # not UTF-8, or a time that Python cannot hold
        cells = [_cell(value) for value in column]
    return [*map(_as_text, cells)]


def _json(cell: str | None) -> Any:
    """Return the value of a cell of Parquet's type JSON, whose syntax is not text."""
    try:
        return None if cell is None else parse_json(cell.encode()).value
    except ValueError:
        return {}  # malformed as a text and as a conversation


def _cell(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return NOT_UTF8
    except ValueError:
        return None


def _as_text(value: Any) -> Any:
    """Return a value in which bytes that are UTF-8 are text."""
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
    if isinstance(value, dict):
        return {key: _as_text(part) for key, part in value.items()}
    return [_as_text(part) for part in value] if isinstance(value, list) else value
