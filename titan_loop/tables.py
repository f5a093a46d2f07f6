"""Text for the terminal: aligned columns, short counts, durations."""

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


def short(count: float) -> str:
    """Return a count with three significant digits and a suffix K, M, B or T."""
    for suffix in ("", "K", "M", "B"):
        if abs(count) < 999.5:
            return f"{count:.3g}{suffix}"
        count /= 1000
    return f"{count:.3g}T"


def format_duration(seconds: float) -> str:
    """Return a duration with its two largest units: 45s, 12m30s, 3h05m, 2d04h."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02}h"
    if hours:
        return f"{hours}h{minute:02}m"
    return f"{minutes}m{second:02}s" if minutes else f"{second}s"
