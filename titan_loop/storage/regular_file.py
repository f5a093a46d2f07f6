"""Reads small files whole; anything else under the name, such as a link to a device, is damage."""

import errno
import os
import stat
from pathlib import Path

from titan_loop.errors import UserError
from titan_loop.storage.transient import ShortReadError, retried

MOST_BYTES = 1 << 26
"""Largest size of a small file; a manifest of 4,096 ranks has half a megabyte."""

_NOT_THE_FILE = {errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG}


class DamagedFileError(UserError):
    """A file does not have the content that its name promises; `fix` ends the message."""

    def __init__(self, path: Path, reason: str, fix: str) -> None:
        super().__init__(path, reason, fix)  # all three, so that ranks can pickle it
        self.path = path
        self.reason = reason
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.path} is damaged ({self.reason}); {self.fix}"


def read_regular(path: Path, *, fix: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a small file, tried again after a transient error or a short read.

    Raises `FileNotFoundError` if it does not exist, `DamagedFileError` if it is not a file of at
    most `most_bytes`, `UserError` if it may not be read, and `OSError` if the disk fails.
    """

    def read() -> bytes:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise DamagedFileError(path, "not a regular file", fix)
            content = file.read(most_bytes + 1)
            if len(content) < min(found.st_size, most_bytes):
                raise ShortReadError(path, f"only {len(content)} bytes were read")
            return content

    try:
        content = retried(read)
    except PermissionError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); change its mode") from error
    except OSError as error:
        if error.errno not in _NOT_THE_FILE:
            raise
        raise DamagedFileError(path, str(error.strerror), fix) from error
    if len(content) > most_bytes:
        raise DamagedFileError(path, f"more than {most_bytes} bytes", fix)
    return content
