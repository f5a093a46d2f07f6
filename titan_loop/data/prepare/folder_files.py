"""The files of a folder that hold its documents; the others are left out and counted."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from titan_loop.data.prepare.file_kinds import (
    ABOUT,
    OTHER,
    RECORDS,
    SIDE,
    by_ending,
    contents_of,
    kind_of,
)
from titan_loop.errors import UserError

logger = logging.getLogger(__name__)


def files_of(
    folder: Path, format: str, patterns: Sequence[str], ours: Sequence[Path]
) -> list[tuple[Path, str]]:
    """Return path and kind of each file to read, by name.

    Records (JSON lines, tables, …) are read and texts beside them are left out; a folder without
    records is read as texts. `format` and `patterns` decide otherwise.
    """
    visible = _visible_files(folder, ours)
    matching = [
        path for path in visible if not patterns or any(path.match(glob) for glob in patterns)
    ]
    if format != "auto" and patterns:
        found = [(path, format) for path in matching]
    else:
        # A file that a pattern chooses is data, whatever it is called.
        kinds = [
            (path, contents_of(path) if patterns else kind_of(path, folder)) for path in matching
        ]
        found = _of_format(kinds, format) if format != "auto" else _records_or_texts(folder, kinds)
        if others := [path for path, kind in kinds if kind == OTHER]:
            logger.warning(f"{folder}: left out {by_ending(others)}, which cannot be read as text")
    if not found:
        wanted = "document" if format == "auto" else format
        rest = f" that matches {', '.join(patterns)}" if patterns else ""
        if format != "auto" and not patterns:
            rest = ": choose by name with --pattern"
        raise UserError(f"input folder {folder} has no {wanted} file{rest}")
    if len(found) < len(visible):
        read = ", ".join(sorted({kind for _, kind in found}))
        logger.info("%s: %d of %d files are %s", folder, len(found), len(visible), read)
    return _without_links(folder, found)


def _of_format(kinds: Iterable[tuple[Path, str]], format: str) -> list[tuple[Path, str]]:
    if format == "text":
        return [(path, format) for path, kind in kinds if kind not in (SIDE, OTHER)]
    return [(path, kind) for path, kind in kinds if kind == format]


def _records_or_texts(folder: Path, kinds: Sequence[tuple[Path, str]]) -> list[tuple[Path, str]]:
    records = [(path, kind) for path, kind in kinds if kind in RECORDS]
    texts = [path for path, kind in kinds if kind == "text"]
    if not records:
        return [(path, "text") for path, kind in kinds if kind in ("text", ABOUT)]
    held = by_ending(path for path, _ in records)
    if len(texts) > len(records):
        raise UserError(
            f"input folder {folder} holds {held} among {by_ending(texts)}: choose with --pattern, "
            f"e.g. '*{records[0][0].suffix}' or '*{texts[0].suffix}', or give --format text to "
            "train on every file as text"
        )
    if texts:
        logger.warning(
            f"{folder}: left out {by_ending(texts)} beside {held}; give texts as an input of their "
            "own"
        )
    return records


def _without_links(folder: Path, found: list[tuple[Path, str]]) -> list[tuple[Path, str]]:
    originals = {path.resolve() for path, _ in found if not path.is_symlink()}
    once = [
        (path, kind)
        for path, kind in found
        if not path.is_symlink() or path.resolve() not in originals
    ]
    if len(once) < len(found):
        logger.warning("%s: left out %d links to other files of it", folder, len(found) - len(once))
    return once


def _visible_files(folder: Path, ours: Sequence[Path]) -> list[Path]:
    root, written = folder.resolve(), {path.resolve() for path in ours}
    files: set[Path] = set()
    shown: list[Path] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if not written.isdisjoint((root / name, *(root / name).parents)):
            continue
        if path.is_file():
            files.add(path)
        if not any(part.startswith(".") for part in name.parts):
            shown.append(path)
    visible = [path for path in shown if path in files]
    if len(visible) < len(files):
        logger.warning("%s: left out %d hidden files", folder, len(files) - len(visible))
    if links := sum(path not in files and path.is_symlink() for path in shown):
        logger.warning(
            f"{folder}: left out {links} links to folders or to nothing; give folders as inputs "
            "of their own"
        )
    return visible
