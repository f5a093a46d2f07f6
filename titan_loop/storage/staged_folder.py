"""A folder that appears whole or not at all: written beside its place, renamed at the end."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan_loop.errors import UserError
from titan_loop.storage.transient import disk_error, retried, unwritable

UNFINISHED = ".unfinished"


@contextmanager
def staged_folder(output: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `output` when the block ends well.

    If the block raises, nothing is left. If the process is killed, `.NAME.unfinished` is left
    beside `output`, and the next attempt removes it.

    Args:
        output: Must not exist, or be an empty folder.

    Raises:
        UserError: There is something already, or the folder may not be written.
        RunFailedError: The disk fails, or is full.
    """
    if output.is_dir() and any(output.iterdir()):
        raise UserError(f"output={output} is not empty; choose a new folder, or delete that one")
    if output.exists() and not output.is_dir():
        raise UserError(f"output={output} is a file; choose a new folder")
    staging = output.absolute().parent / f".{output.name}{UNFINISHED}"
    try:
        retried(lambda: output.absolute().parent.mkdir(parents=True, exist_ok=True))
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
    except OSError as error:
        raise unwritable(f"output={output}", error) from error
    try:
        yield staging
        _sync(staging)
        os.rename(staging, output)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise disk_error(
            error,
            f"output={output} could not be finished, and nothing is left of it ({error}); make "
            "room, or choose another folder",
        ) from error
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _sync(folder: Path) -> None:
    """Have everything on the disk before the name that says so."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
