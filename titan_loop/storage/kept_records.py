"""Records of `.jsonl` files that a failing disk cannot take yet: kept in memory, written later.

append_or_keep ─► the disk fails: one warning, the record is kept
the next append or save ─► all kept records are tried again
give_up_kept at the end ─► tried once more; the records that are lost are counted
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from titan_loop.storage.json_files import append_jsonl

logger = logging.getLogger(__name__)

Append: TypeAlias = Callable[[Path, Mapping[str, Any]], None]


class _Kept(NamedTuple):
    append: Append
    records: list[Mapping[str, Any]]


_files: dict[Path, _Kept] = {}  # of the run at hand: `give_up_kept` ends it


def append_or_keep(path: Path, record: Mapping[str, Any], append: Append = append_jsonl) -> None:
    """Append one record; if the disk fails, warn and keep the record for the next time."""
    kept = _files.setdefault(path, _Kept(append, []))
    first = not kept.records
    kept.records.append(record)
    if (error := _written(path)) is not None and first:
        logger.warning("%s: %s; its records are kept in memory and written later", path, error)
    elif error is None and not first:
        logger.warning("%s: the kept records are written", path)


def write_kept() -> None:
    """Write the kept records, as far as the disk works."""
    for path in [*_files]:
        _written(path)


def give_up_kept() -> None:
    """Write the kept records for the last time; log the number of lost ones."""
    for path, kept in [*_files.items()]:
        if (error := _written(path)) is not None:
            lost = len(kept.records)
            logger.error("%s lacks %d records that could not be written: %s", path, lost, error)
    _files.clear()


def _written(path: Path) -> OSError | None:
    append, records = _files[path]
    while records:
        try:
            append(path, records[0])
        except OSError as error:
            return error
        records.pop(0)
    del _files[path]
    return None
