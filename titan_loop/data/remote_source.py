"""Prepared sources in an object store, copied once to a cache on this machine.

    s3://BUCKET/…/NAME ─► CACHE/<hash of the address>/NAME, whole, when its card is first read

Windows are read in a random order, so that a run soon touches every shard. The processes of a
machine, or of all machines that share the cache, wait for the one that copies. What is there
already is not copied again, and an interrupted copy is completed.
"""

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from titan_loop.errors import RunFailedError, UserError
from titan_loop.storage.remote_folder import RemoteFolder, check_address
from titan_loop.storage.transient import ATTEMPTS, WAIT_SECONDS, count_retry

logger = logging.getLogger(__name__)

FIELD = "dataloader.mixture"
CACHE_VARIABLE = "TITAN_LOOP_SOURCE_CACHE"
_PARALLEL_COPIES = 8

T = TypeVar("T")

_addresses: dict[str, str] = {}
_complete: set[str] = set()


def is_remote(path: str) -> bool:
    """Return whether a source is given by an address, such as s3://BUCKET/FOLDER."""
    return "://" in path


def local_folder(address: str) -> str:
    """Return where a remote source will be on this machine; nothing is copied yet.

    Raises:
        UserError: The address has an unknown scheme, or holds credentials.
    """
    check_address(address, FIELD)
    address = address.rstrip("/")
    cache = os.environ.get(CACHE_VARIABLE) or "~/.cache/titan_loop/sources"
    name = hashlib.sha256(address.encode()).hexdigest()[:16]
    folder = str(Path(cache).expanduser().absolute() / name / address.rpartition("/")[2])
    _addresses[folder] = address
    return folder


def copy_if_remote(folder: Path, card_name: str) -> None:
    """Copy a source here if `folder` is from `local_folder` and this process did not look yet.

    Args:
        folder: A source's folder.
        card_name: The file that makes a folder a source; copied last.

    Raises:
        UserError: The address cannot be used, is not a source, or was changed since it was copied.
        RunFailedError: It does not arrive.
    """
    address = _addresses.get(str(folder))
    if address is None or address in _complete:
        return
    remote = RemoteFolder(address, FIELD)
    sizes = _tried(remote.files)
    if card_name not in sizes:
        raise UserError(
            f"{FIELD}: {address} has no {card_name}: it is not a prepared source, or its copying "
            "was interrupted"
        )
    card = _tried(lambda: remote.read(card_name))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        here = folder / card_name
        if here.is_file() and here.read_bytes() != card:
            raise UserError(
                f"{FIELD}: {address} has changed since it was copied; delete {folder.parent}, or "
                "give the new source an address of its own"
            )
        left = [
            name
            for name, size in sizes.items()
            if name != card_name and _size(folder / name) != size
        ]
        if left:
            total = sum(sizes[name] for name in left) / 2**30
            logger.info(
                "Copying %d files (%.1f GiB) of %s to %s", len(left), total, address, folder
            )
        with ThreadPoolExecutor(_PARALLEL_COPIES, thread_name_prefix="source") as copies:
            list(copies.map(lambda name: _copy(remote, name, folder / name, sizes[name]), left))
        here.write_bytes(card)
    _complete.add(address)


def _copy(remote: RemoteFolder, name: str, target: Path, size: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    arriving = target.with_name(f".arriving-{target.name}")

    def copy() -> None:
        remote.download(name, arriving)
        if _size(arriving) != size:
            raise OSError(f"{_size(arriving)} of {size} bytes of {remote.url}/{name} arrived")

    _tried(copy)
    arriving.replace(target)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _tried(read: Callable[[], T]) -> T:
    """Return what `read` returns, called again after any error: every store has its own."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return read()
        except Exception as error:
            if attempt == ATTEMPTS:
                raise RunFailedError(
                    f"{error}; the store did not answer {ATTEMPTS} times"
                ) from error
            logger.warning("%s (attempt %d of %d)", error, attempt, ATTEMPTS)
        count_retry()
        time.sleep(WAIT_SECONDS * 2 ** (attempt - 1))
    raise AssertionError("the last attempt returns or raises")
