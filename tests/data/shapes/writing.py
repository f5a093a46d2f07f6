"""Texts and files that many rows share."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

TEXTS = ("first: naïve 漢字 🙂\n", "def second(x):\n    return x + 12\n", "the third document")


def json_lines(records: Sequence[Any]) -> bytes:
    """Return records as JSON lines, as Python writes them."""
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def jsonl(texts: Sequence[str]) -> bytes:
    """Return texts as JSON lines with the field `text`."""
    return json_lines([{"text": text} for text in texts])


def parquet(columns: Mapping[str, Any]) -> bytes:
    """Return a Parquet file of these columns, lists or Arrow arrays."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.table(dict(columns)), file)
    return file.getvalue()


def files(contents: Mapping[str, bytes | str]) -> Callable[[Path], None]:
    """Return a function that writes files by their names below a folder."""

    def write(folder: Path) -> None:
        for name, content in contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    return write
