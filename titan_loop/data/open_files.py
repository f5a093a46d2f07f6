"""Files that stay open and are read at an offset, as many as the system allows.

They are not memory-mapped: a map costs more than reading a few pages, a page fault reads the
device's whole read-ahead, and a fault past the end of a truncated file kills the process.
"""

import os
import resource
import weakref
from contextlib import suppress

import numpy as np

from titan_loop.errors import UserError
from titan_loop.storage.transient import ShortReadError, retried, unreadable

_OPEN_FILES_WANTED = 65_536
_OTHER_FILES = 1024  # left to the rest of the process; as many as most programs may open


def open_file_limit() -> int:
    """Raise this process's limit of open files as far as allowed, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    no_limit = resource.RLIM_INFINITY
    wanted = _OPEN_FILES_WANTED if hard == no_limit else min(hard, _OPEN_FILES_WANTED)
    if soft == no_limit or soft >= wanted:
        return wanted
    with suppress(OSError, ValueError):  # some containers forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


class OpenFiles:
    """Files opened when first asked for; shared by the sources of a mixture.

    Beyond `most` open files (None: the system's limit less 1,024, at least half the limit), the one
    opened first is closed. Windows come in a random order, so closing the least recently used one
    would be no better.
    """

    def __init__(self, most: int | None = None) -> None:
        allowed = open_file_limit()
        self._most = most or max(allowed - _OTHER_FILES, allowed // 2)
        self._descriptors: dict[str, int] = {}
        # Not __del__: when the interpreter ends, `os` may be gone before this object is.
        weakref.finalize(self, _close_all, self._descriptors)

    def __len__(self) -> int:
        return len(self._descriptors)

    def close(self) -> None:
        """Close all files; reading one opens it again."""
        _close_all(self._descriptors)

    def read(self, path: str, dtype: np.dtype, first: int, count: int) -> np.ndarray:
        """Return `count` values of the file, from value number `first` on, as a read-only array."""
        size = count * dtype.itemsize

        def read() -> bytes:
            try:
                data = os.pread(self._descriptor(path), size, first * dtype.itemsize)
                if len(data) < size:
                    raise ShortReadError(path, f"{len(data)} of {size} bytes were read")
                return data
            except OSError:
                if path in self._descriptors:
                    os.close(self._descriptors.pop(path))
                raise

        try:
            return np.frombuffer(retried(read), dtype=dtype)
        except (ShortReadError, FileNotFoundError) as error:
            problem = f"file {path} was removed or truncated while it was in use"
            raise UserError(f"{problem} ({error.strerror}): restore it") from None
        except OSError as error:
            raise unreadable(path, error, "check its disk and permissions") from error

    def _descriptor(self, path: str) -> int:
        if path in self._descriptors:
            return self._descriptors[path]
        if len(self._descriptors) >= self._most:
            os.close(self._descriptors.pop(next(iter(self._descriptors))))
        self._descriptors[path] = os.open(path, os.O_RDONLY)
        return self._descriptors[path]


def _close_all(descriptors: dict[str, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
