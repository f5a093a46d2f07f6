"""One shape of data that people have: its files, and what becomes of them.

`titan_loop/data/SHAPES.md` says in words what each row is.
"""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_loop.data.inspect_source import show_source

TEXTS = ("first: naïve 漢字 🙂\n", "def second(x):\n    return x + 12\n", "the third document")
Contents = Mapping[str, bytes | str] | Callable[[Path], object]


@dataclass(frozen=True)
class Shape:
    """A row: either the documents that a source must hold, or the refusal.

    Attributes:
        contents: Files by name, or what writes them into an empty folder.
        inputs: Inputs of `tokenize_source`, relative to that folder, in which it runs.
        options: Further arguments of `tokenize_source`; paths are relative, too.
        train: Texts of the documents to train on, in any order; chats in their template.
        held_out: Texts of the held-out documents.
        targets: What each training document teaches, as text, in the order of `train`; None if
            documents have no loss mask and every token is a target.
        warned: A part of every warning but that of dropped records; any other fails the row.
        dropped: Dropped records by reason, as the card counts them; half may be malformed.
        repaired: Repaired records by kind, as the card counts them.
        tokenizer: Writes a tokenizer.json into a folder and returns it; None for the tests' own
            byte-level one.
        stored: Texts that the stored ids give back, where a tokenizer changes them; else `train`.
        refused: Pattern of the one line that refuses the data; then nothing is stored.
    """

    contents: Contents
    inputs: tuple[str, ...] = (".",)
    options: Mapping[str, Any] = field(default_factory=dict)
    train: tuple[str, ...] = TEXTS
    held_out: tuple[str, ...] = ()
    targets: tuple[str, ...] | None = None
    warned: tuple[str, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    repaired: Mapping[str, int] = field(default_factory=dict)
    tokenizer: Callable[[Path], Path] | None = None
    stored: tuple[str, ...] | None = None
    refused: str = ""

    def write(self, folder: Path) -> None:
        if callable(self.contents):
            self.contents(folder)
            return
        for name, content in self.contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)


Rows = Mapping[str, Shape]
"""Rows by their names in the page."""


def json_lines(records: Sequence[Any]) -> bytes:
    """Return records as JSON lines, as Python writes them."""
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def jsonl(texts: Sequence[str]) -> bytes:
    """Return texts as JSON lines with the field `text`."""
    return json_lines([{"text": text} for text in texts])


def stored(source: Path, split: str = "train") -> list[str]:
    """Return the texts of a source's split in their order."""
    shown = show_source(source, count=10**6, split=split)
    return [document.text.removesuffix("<|endoftext|>") for document in shown]


def parquet(columns: Mapping[str, Any]) -> bytes:
    """Return a Parquet file of these columns, lists or Arrow arrays."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.table(dict(columns)), file)
    return file.getvalue()
