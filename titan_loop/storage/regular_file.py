"""Reads paths that may be anything: a FIFO never ends, and a sparse file fills the memory."""

import errno
import os
import stat
from io import BufferedRandom, BufferedReader
from pathlib import Path

from titan_loop.errors import UserError
from titan_loop.storage.transient import ShortReadError, retried

MOST_BYTES = 1 << 26
"""Largest size of a small file; a manifest of 4,096 ranks has half a megabyte."""

_NOT_THE_FILE = (
    errno.EISDIR,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.ENXIO,
    errno.ENODEV,
)


class DamagedFileError(UserError):
    """A file does not have the content that its name promises; `fix` ends the message."""

    def __init__(self, path: Path, reason: str, fix: str) -> None:
        super().__init__(path, reason, fix)  # all three, so that ranks can pickle it
        self.path = path
        self.reason = reason
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.path} is damaged ({self.reason}); {self.fix}"


def open_regular(path: Path, *, fix: str) -> BufferedReader:
    """Open a regular file to read it.

    Raises:
        FileNotFoundError: The file does not exist.
        DamagedFileError: It is not a regular file.
        UserError: It may not be read.
        OSError: The disk fails, which says nothing about the file.
    """
    return os.fdopen(_open(path, os.O_RDONLY, fix), "rb")


def open_to_append(path: Path, *, fix: str) -> BufferedRandom:
    """Open a regular file, or a new one, to read and to append; errors as in `open_regular`."""
    return os.fdopen(_open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, fix), "r+b")


def _open(path: Path, flags: int, fix: str) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)  # else a FIFO waits for a writer
    except OSError as error:
        if error.errno in _NOT_THE_FILE:
            raise DamagedFileError(path, str(error.strerror), fix) from error
        if isinstance(error, PermissionError):
            raise UserError(
                f"{path} cannot be read or written ({error.strerror}); change its permissions"
            ) from error
        raise
    # Check the open file, since another one may have the name by now.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedFileError(path, "not a regular file", fix)
    return descriptor


def read_regular(path: Path, *, fix: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file, tried again after a transient error or a short read.

    Errors as in `open_regular`; more than `most_bytes` are damage, too.
    """

    def read() -> bytes:
        with open_regular(path, fix=fix) as file:
            content = file.read(most_bytes + 1)
            if len(content) < min(os.fstat(file.fileno()).st_size, most_bytes):
                raise ShortReadError(path, f"only {len(content)} bytes were read")
            return content

    content = retried(read)
    if len(content) > most_bytes:
        raise DamagedFileError(path, f"more than {most_bytes} bytes", fix)
    return content
