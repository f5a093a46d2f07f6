"""Rows of tables, through pyarrow: Parquet, Arrow, CSV and TSV."""

import csv
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from titan_loop.data.prepare.compression import open_file

if TYPE_CHECKING:
    import pyarrow

NOT_UTF8 = b"\xff"
"""The value of a cell that should be text and is not UTF-8."""

_BATCH_ROWS = 1000
_CSV_BLOCK_BYTES = 1 << 26  # pyarrow refuses a row that does not fit into two


def table_rows(path: str, kind: str, wanted: Sequence[str]) -> Iterator[dict[str, Any] | str]:
    """Yield the rows of a file, or the fault of a row that cannot be split into columns.

    A table without any wanted column gives rows with all its columns, as None.

    Args:
        path: Path of the file, which may be compressed.
        kind: "parquet", "arrow", "csv" or "tsv".
        wanted: The columns to read, of which a table may lack some.

    Raises:
        pyarrow.ArrowException: If the file is not such a table.
    """
    with open_file(path) as file:
        match kind:
            case "parquet":
                yield from _parquet_rows(file, wanted)
            case "arrow":
                yield from _arrow_rows(file, wanted)
            case _:
                yield from _csv_rows(file, path, wanted, tabs=kind == "tsv")


def _parquet_rows(file: Any, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        names = table.schema_arrow.names
        if (read := _columns(names, wanted)) is None:
            yield from _without_columns(names, table.metadata.num_rows)
            return
        for batch in table.iter_batches(_BATCH_ROWS, columns=read):
            yield from _rows(batch)


def _arrow_rows(file: Any, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
    import pyarrow

    try:
        reader = pyarrow.ipc.open_file(file)
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
    except pyarrow.ArrowInvalid:  # `datasets` writes streams
        file.seek(0)
        batches = reader = pyarrow.ipc.open_stream(file)
    names = reader.schema.names
    read = _columns(names, wanted)
    for batch in batches:
        if read is None:
            yield from _without_columns(names, batch.num_rows)
        else:
            yield from _rows(batch.select(read))


def _csv_rows(
    file: Any, path: str, wanted: Sequence[str], *, tabs: bool
) -> Iterator[dict[str, Any] | str]:
    import pyarrow
    import pyarrow.csv

    with open_file(path) as head:
        first = head.readline(1 << 20).decode("utf-8-sig", errors="replace")
    if not first:  # as Spark writes an empty partition
        return
    # Spreadsheets of many countries separate by semicolons.
    delimiter = "\t" if tabs else max(",;\t", key=first.count)
    names = next(csv.reader([first], delimiter=delimiter), [])
    read = _columns(names, wanted)
    faults: list[str] = []

    def skip(row: Any) -> str:
        faults.append(f"{row.actual_columns} columns instead of {row.expected_columns}")
        return "skip"

    reader = pyarrow.csv.open_csv(
        file,
        read_options=pyarrow.csv.ReadOptions(block_size=_CSV_BLOCK_BYTES, use_threads=False),
        parse_options=pyarrow.csv.ParseOptions(
            delimiter=delimiter, newlines_in_values=True, invalid_row_handler=skip
        ),
        # Bytes, because a row that is not UTF-8 must not end the file.
        convert_options=pyarrow.csv.ConvertOptions(
            include_columns=names if read is None else read,
            column_types=dict.fromkeys(names, pyarrow.binary()),
        ),
    )
    for batch in reader:
        if read is None:
            yield from _without_columns(names, batch.num_rows)
        else:
            yield from _rows(batch)
        yield from faults
        faults.clear()
    yield from faults


def _columns(names: list[str], wanted: Sequence[str]) -> list[str] | None:
    """Return the columns to read; None if there is none."""
    return [name for name in names if name in wanted] or None


def _without_columns(names: list[str], rows: int) -> Iterator[dict[str, Any]]:
    return (dict.fromkeys(names) for _ in range(rows))


def _rows(batch: "pyarrow.RecordBatch") -> Iterator[dict[str, Any]]:
    names = batch.schema.names
    for cells in zip(*map(_cells, batch.columns), strict=True):
        yield dict(zip(names, cells, strict=True))


def _cells(column: "pyarrow.Array") -> list[Any]:
    try:
        cells = column.to_pylist()
    except ValueError:  # not UTF-8, or a time that Python cannot hold
        cells = [_cell(value) for value in column]
    return [_as_text(cell) for cell in cells] if _holds_bytes(column.type) else cells


def _cell(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return NOT_UTF8
    except ValueError:
        return None


def _holds_bytes(kind: Any) -> bool:
    import pyarrow

    inner = [kind.field(number).type for number in range(kind.num_fields)]
    if pyarrow.types.is_dictionary(kind):
        inner = [kind.value_type]
    return "binary" in str(kind) if not inner else any(map(_holds_bytes, inner))


def _as_text(value: Any) -> Any:
    """Return a value in which bytes that are UTF-8 are text."""
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
    if isinstance(value, dict):
        return {key: _as_text(part) for key, part in value.items()}
    return [_as_text(part) for part in value] if isinstance(value, list) else value
