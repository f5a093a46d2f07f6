"""A start on a full disk says how much is missing."""

import errno
import os

import pytest

from titan_loop.errors import RunFailedError, UserError
from titan_loop.storage import room
from titan_loop.storage.room import require_room, require_writable


@pytest.fixture
def written(monkeypatch):
    """The error of every write, 0 for none."""
    errors = [0]

    def write(folder, content):
        if errors[0]:
            raise OSError(errors[0], os.strerror(errors[0]))
        return folder

    monkeypatch.setattr(room, "_write_nameless", write)
    return errors


def test_a_full_disk_ends_a_start_and_one_that_is_too_small_is_a_warning(tmp_path, written, caplog):
    require_room(tmp_path, 1 << 62)
    assert "for a checkpoint; saves will fail until there is room" in caplog.text
    written[:] = [errno.EDQUOT]
    with pytest.raises(RunFailedError, match="1,049,576 bytes more are needed; make room, then"):
        require_room(tmp_path, 1000)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (errno.EACCES, UserError), (errno.ENOENT, UserError), (errno.EIO, RunFailedError),
        (errno.EROFS, RunFailedError), (errno.ETIMEDOUT, RunFailedError), (errno.ENOSPC, None),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_written_is_the_user_s_fault_or_the_machine_s(
    tmp_path, written, fault, kind
):
    written[:] = [fault]
    if kind is None:
        require_writable(tmp_path, "x")
        return
    with pytest.raises(kind, match=rf"^x cannot be written \({os.strerror(fault)}\)"):
        require_writable(tmp_path, "x")
