"""Prepared sources in an object store, copied once to a cache on this machine.

    s3://BUCKET/…/NAME ─► CACHE/<hash of the address>/NAME, whole, when its card is first read

Windows come in a random order, so a run soon touches every shard. All processes that share the
cache wait for the one that copies. An interrupted copy is completed.
"""

import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from titan_loop.errors import RunFailedError, UserError
from titan_loop.storage.file_names import path_below, require_file_name
from titan_loop.storage.remote_folder import RemoteFolder, check_address
from titan_loop.storage.transient import ATTEMPTS, retried

logger = logging.getLogger(__name__)

FIELD = "dataloader.mixture"
CACHE_VARIABLE = "TITAN_LOOP_SOURCE_CACHE"
_PARALLEL_COPIES = 8
_ARRIVING = ".arriving-"

T = TypeVar("T")

_addresses: dict[str, str] = {}
_complete: set[str] = set()


def is_remote(path: str) -> bool:
    """Return whether a source is given by an address, such as s3://BUCKET/FOLDER."""
    return "://" in path


def local_folder(address: str) -> str:
    """Return the folder for a remote source on this machine; nothing is copied yet."""
    check_address(address, FIELD)
    address = address.rstrip("/")
    own_name = require_file_name(address.rpartition("/")[2], FIELD)
    cache = os.environ.get(CACHE_VARIABLE) or "~/.cache/titan_loop/sources"
    digest = hashlib.sha256(address.encode()).hexdigest()[:16]
    folder = str(Path(cache).expanduser().absolute() / digest / own_name)
    _addresses[folder] = address
    return folder


def copy_if_remote(folder: Path, card_name: str, files_of: Callable[[Path], Iterable[str]]) -> None:
    """Copy a source here if `folder` is from `local_folder` and this process has not done so yet.

    Only the files that `files_of` returns for its card are copied; the card is put in place last.
    Raises `UserError` for a source that was changed since it was copied, and `RunFailedError` if
    the store fails.
    """
    address = _addresses.get(str(folder))
    if address is None or address in _complete:
        return
    remote = RemoteFolder(address, FIELD)
    sizes = _tried(remote.files)

    def require(name: str, problem: str) -> None:
        if name not in sizes:
            raise UserError(
                f"{FIELD}: {address} has no {name}{problem}: it is not a prepared source, or its "
                "copying was interrupted"
            )

    require(card_name, "")
    folder.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(folder.parent / "lock"):
        here, card = folder / card_name, _arriving(folder / card_name)
        card.write_bytes(_tried(lambda: remote.read(card_name)))
        if here.is_file() and here.read_bytes() != card.read_bytes():
            raise UserError(
                f"{FIELD}: {address} has changed since it was copied; delete {folder.parent}, or "
                "give the new source an address of its own"
            )
        places = {name: path_below(folder, name, here) for name in files_of(card)}
        for name in places:
            require(name, f", which its {card_name} names")
        missing = [name for name, place in places.items() if _size(place) != sizes[name]]
        size_gib = sum(sizes[name] for name in missing) / 2**30
        logger.info(
            "Copying %d files (%.1f GiB) of %s to %s", len(missing), size_gib, address, folder
        )

        def copy(name: str) -> None:
            place = places[name]
            place.parent.mkdir(parents=True, exist_ok=True)
            _tried(lambda: _download(remote, name, _arriving(place), sizes[name]))
            _arriving(place).replace(place)

        with ThreadPoolExecutor(_PARALLEL_COPIES, thread_name_prefix="source") as copies:
            list(copies.map(copy, missing))
        card.replace(here)
    _complete.add(address)


def _download(remote: RemoteFolder, name: str, place: Path, size: int) -> None:
    remote.download(name, place)
    if _size(place) != size:
        raise OSError(f"{_size(place)} of {size} bytes of {remote.url}/{name} arrived")


def _arriving(place: Path) -> Path:
    return place.with_name(f"{_ARRIVING}{place.name}")


@contextmanager
def _one_at_a_time(lock_path: Path) -> Iterator[None]:
    with lock_path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(
                f"{lock_path} cannot be locked ({error.strerror}): set {CACHE_VARIABLE} to a "
                "folder on a disk of this machine"
            ) from error
        yield


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _tried(read: Callable[[], T]) -> T:
    """Call `read`, and retry after any error: every store's client raises its own kinds."""
    try:
        return retried(read, is_transient=lambda error: True)
    except Exception as error:
        raise RunFailedError(f"{error}; the store did not answer {ATTEMPTS} times") from error
