"""Aligned columns for the terminal: the one table printer."""

from collections.abc import Collection, Iterable, Sequence


def columns(rows: Iterable[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
    """Return one line per row, with two spaces between columns as wide as their widest cell.

    The columns with indices in `left` are aligned to the left, the others to the right.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def text_table(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """Return `columns` as one text with a rule below the first row, the header."""
    lines = columns(rows, left=left)
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
