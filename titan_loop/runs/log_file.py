"""`log.txt` of a run: rank 0's log, all starts one after another."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan_loop.storage.transient import retried

_FORMAT = logging.Formatter("%(asctime)s %(levelname)s %(message)s")


class _LogFile(logging.FileHandler):
    lost = 0

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Count a line that cannot be written: a full disk must not stop a run."""
        self.lost += 1


@contextmanager
def kept_log(path: Path) -> Iterator[None]:
    """Append to a file everything that is logged in the block, and the error that ends it."""
    file = retried(lambda: _LogFile(path, encoding="utf-8"))
    file.setFormatter(_FORMAT)
    root = logging.getLogger()
    root.addHandler(file)
    try:
        yield
    except BaseException as error:
        record = {"msg": f"ended by {type(error).__name__}: {error}", "levelname": "ERROR"}
        file.emit(logging.makeLogRecord(record))
        raise
    finally:
        root.removeHandler(file)
        with suppress(OSError):
            file.close()
        if file.lost:
            logging.getLogger(__name__).warning("%s lacks up to %d lines", path, file.lost)
