"""Records of `.jsonl` files that a failing disk cannot take yet: kept in memory, written later.

append_or_keep ─► the disk fails: one warning, the record is kept
the next append or save ─► all kept records are tried again
give_up_kept at the end ─► tried once more; the records that are lost are counted
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from titan_loop.storage.json_files import append_jsonl

logger = logging.getLogger(__name__)

MOST_KEPT = 10_000
"""Records that are kept for one file; beyond that, the oldest are dropped."""

Append: TypeAlias = Callable[[Path, Mapping[str, Any]], None]


@dataclass
class _Kept:
    append: Append
    records: deque[Mapping[str, Any]] = field(default_factory=deque)
    dropped: int = 0
    failed: bool = False


_files: dict[Path, _Kept] = {}  # of the run at hand: `give_up_kept` ends it


def append_or_keep(path: Path, record: Mapping[str, Any], append: Append = append_jsonl) -> None:
    """Append one record; if the disk fails, warn and keep the record for the next time."""
    kept = _files.setdefault(path, _Kept(append))
    first = not kept.records
    kept.records.append(record)
    if len(kept.records) > MOST_KEPT:
        kept.records.popleft()
        kept.dropped += 1
    error = _write(path, kept)
    if error is not None and first:
        logger.warning("%s: %s; its records are kept in memory and written later", path, error)


def write_kept() -> None:
    """Write the kept records, as far as the disk works."""
    for path, kept in list(_files.items()):
        _write(path, kept)


def give_up_kept() -> None:
    """Write the kept records for the last time; log the number of lost ones."""
    for path, kept in list(_files.items()):
        if (error := _write(path, kept)) is not None:
            lost = kept.dropped + len(kept.records)
            logger.error("%s lacks %d records that could not be written: %s", path, lost, error)
    _files.clear()


def _write(path: Path, kept: _Kept) -> OSError | None:
    written = 0
    while kept.records:
        try:
            kept.append(path, kept.records[0])
        except OSError as error:
            kept.failed = True
            return error
        kept.records.popleft()
        written += 1
    if kept.failed:
        logger.warning("%s: %d kept records are written, %d lost", path, written, kept.dropped)
    del _files[path]
    return None
