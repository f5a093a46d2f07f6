"""Folders and files that appear whole or not at all: written beside their place, then renamed."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan_loop.errors import UserError
from titan_loop.storage.json_files import sync_to_disk
from titan_loop.storage.transient import disk_error, retried, unwritable


@contextmanager
def staged_folder(output: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `output`, which must be empty or absent, at the end.

    If the block raises, nothing is left. If the process is killed, `.NAME.unfinished` is left
    beside `output`, and the next attempt removes it.
    """
    if output.is_dir() and any(output.iterdir()):
        raise UserError(f"output={output} is not empty; choose a new folder, or delete that one")
    if output.exists() and not output.is_dir():
        raise UserError(f"output={output} is a file; choose a new folder")
    with _staged(output, Path.mkdir) as staging:
        yield staging


@contextmanager
def staged_file(output: Path) -> Iterator[Path]:
    """Yield a path whose file becomes `output` when the block ends well; like `staged_folder`."""
    if output.exists():
        raise UserError(f"output={output} exists; choose a new file, or delete that one")
    with _staged(output, Path.touch) as staging:
        yield staging


@contextmanager
def _staged(output: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    target = output.resolve()  # a link to an empty folder, or to nothing, is kept
    staging = target.parent / f".{target.name}.unfinished"
    try:
        retried(lambda: staging.parent.mkdir(parents=True, exist_ok=True))
        _remove(staging)
        make(staging)
    except OSError as error:
        raise unwritable(f"output={output}", error) from error
    try:
        yield staging
        sync_to_disk([*staging.rglob("*"), staging])  # before the new name marks it complete
        os.rename(staging, target)
        with suppress(OSError):  # the new name is there, whether or not it would outlive a crash
            sync_to_disk([staging.parent])
    except OSError as error:
        _remove(staging)
        raise disk_error(
            error,
            f"output={output} could not be finished, and nothing is left of it ({error}); make "
            "room, or choose another place",
        ) from error
    except BaseException:
        _remove(staging)
        raise


def _remove(staging: Path) -> None:
    shutil.rmtree(staging, ignore_errors=True)
    with suppress(FileNotFoundError, IsADirectoryError):
        staging.unlink()
