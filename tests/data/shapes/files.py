"""Which files of an input are data, and how they are read."""

import gzip

from tests.data.shapes.shape import Shape
from tests.data.shapes.writing import TEXTS, jsonl

_FORMATS = "Formats"

ROWS = (
    Shape(
        section=_FORMATS,
        found="`a.jsonl`",
        taken="JSON lines: the field `text` of every record is a document",
        make=lambda folder: (folder / "a.jsonl").write_bytes(jsonl(TEXTS)),
        train=TEXTS,
    ),
    Shape(
        section=_FORMATS,
        found="`a.jsonl.gz`",
        taken="JSON lines",
        make=lambda folder: (folder / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(TEXTS))),
        train=TEXTS,
    ),
)
