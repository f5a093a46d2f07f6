"""`titan_loop/data/SHAPES.md`, which `python -m tests.data.shapes.page` writes from the rows."""

from pathlib import Path

import titan_loop.data
from tests.data.shapes import chats, files, records, tokenizers
from tests.data.shapes.shape import Rows

ROWS: Rows = {**files.ROWS, **records.ROWS, **chats.ROWS, **tokenizers.ROWS}
PATH = Path(titan_loop.data.__file__).with_name("SHAPES.md")
_HEAD = """\
# Shapes of data

What `titan-loop data tokenize` makes of files and records that people have.
`tests/data/shapes/test_shapes.py` prepares every row, prints it and trains on it;
`python -m tests.data.shapes.page` writes this page from the same rows.
"""


def page() -> str:
    """Return the page, a table below each section's heading."""
    parts = [_HEAD]
    for section, rows in ROWS.items():
        cells = (row.replace("|", r"\|").split(" → ") for row in rows)
        lines = [f"| {found} | {taken} |" for found, taken in cells]
        head = ["| found | what becomes of it |", "|---|---|"]
        parts.append("\n".join([f"\n## {section}\n", *head, *lines, ""]))
    return "".join(parts)


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
