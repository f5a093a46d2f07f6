"""Sizes and SHA-256 of a checkpoint's files, as the manifest records them, and what disagrees."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict

from titan_loop.errors import UserError

METADATA = ".metadata"


class FileRecord(TypedDict):
    """What the manifest says of one file."""

    bytes: int
    sha256: str


def rank_files(checkpoint: Path, rank: int) -> list[str]:
    """Return the names of the files a rank wrote; rank 0 wrote DCP's metadata, too."""
    names = sorted(path.name for path in checkpoint.glob(f"__{rank}_*.distcp"))
    return [*names, METADATA] if rank == 0 else names


def file_records(checkpoint: Path, names: Iterable[str] | None = None) -> dict[str, FileRecord]:
    """Read files and return their sizes and hashes.

    Args:
        checkpoint: The checkpoint's folder.
        names: Files in it; None takes all that DCP wrote.

    Raises:
        OSError: A file cannot be read.
    """
    if names is None:
        names = sorted([path.name for path in checkpoint.glob("*.distcp")] + [METADATA])
    return {name: _record(checkpoint / name) for name in names}


def find_damage(
    checkpoint: Path, records: Mapping[str, FileRecord], *, hashes: bool = True
) -> list[str]:
    """Compare files with their records.

    Args:
        checkpoint: The checkpoint's folder.
        records: Files to look at, and what the manifest says of each.
        hashes: Whether to read the files; False compares sizes only.

    Returns:
        One phrase a damaged file, naming it; empty if all is well.

    Raises:
        UserError: A file cannot be read: that may pass, and says nothing about the checkpoint.
    """
    damage = []
    for name, record in records.items():
        path = checkpoint / name
        try:
            size = path.stat().st_size
            if size != record["bytes"]:
                damage.append(f"{name} has {size} bytes instead of {record['bytes']}")
            elif hashes and _record(path)["sha256"] != record["sha256"]:
                damage.append(f"{name} has another SHA-256 than when it was written")
        except FileNotFoundError:
            damage.append(f"{name} is missing")
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror}); check its disk and permissions"
            ) from error
    return damage


def _record(path: Path) -> FileRecord:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}
