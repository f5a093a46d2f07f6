"""Writes `titan_loop/data/SHAPES.md`."""

from tests.data.shapes.table import PATH, as_markdown

PATH.write_text(as_markdown(), encoding="utf-8")
print(PATH)
