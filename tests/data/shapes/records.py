"""Records of JSON lines and tables: what their text is, and what is repaired or dropped."""

from tests.data.shapes.shape import Shape
from tests.data.shapes.writing import json_lines

_RECORDS = "Records"

ROWS = (
    Shape(
        section=_RECORDS,
        found="a record whose text is empty",
        taken="dropped and counted as `empty`",
        make=lambda folder: (folder / "a.jsonl").write_bytes(
            json_lines([{"text": ""}, {"text": "one"}])
        ),
        train=("one",),
        dropped={"empty": 1},
        warned=("dropped 1 empty of 2 records",),
    ),
)
