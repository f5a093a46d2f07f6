"""A disk that fails on demand: file operations below a folder raise an error of the system.

An audit hook sees every open, rename and listing, whichever library asks for it. It cannot be
removed, so this is for processes that a test forks.
"""

import errno
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_loop.storage.transient import FULL_ERRNOS

_WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
_READS = {"os.listdir", "os.scandir"}
_WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writing beyond `size` bytes of any file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class FailingDisk:
    """The disk below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder.absolute())
        self.fault = 0
        self.count = 0
        self._stat = os.stat
        os.stat = self._look_at  # not audited
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.fault or event not in {"open", *_WRITES, *_READS}:
            return
        writes = event in _WRITES or (event == "open" and arguments[2] & _WRITING_FLAGS)
        if self.fault in FULL_ERRNOS:
            writes = writes and event in ("open", "os.mkdir")
        self._fail(arguments[0], bool(writes))

    def _look_at(self, path: Any, *arguments: Any, **keywords: Any) -> os.stat_result:
        self._fail(path, writes=False)
        return self._stat(path, *arguments, **keywords)

    def _fail(self, path: Any, writes: bool) -> None:
        if not self.fault or isinstance(path, int) or path is None:
            return
        if not (writes or self._fails_reads):
            return
        name = os.path.abspath(os.fsdecode(path))
        if name == self._folder or name.startswith(f"{self._folder}{os.sep}"):
            self.count += 1
            raise OSError(self.fault, os.strerror(self.fault), name)

    @property
    def _fails_reads(self) -> bool:
        return self.fault not in FULL_ERRNOS and self.fault != errno.EROFS
