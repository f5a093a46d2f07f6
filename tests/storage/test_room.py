"""A start on a full disk waits, a while, and says how much is missing."""

import errno
import os

import pytest

from titan_loop.errors import RunFailedError, UserError
from titan_loop.storage import room, transient
from titan_loop.storage.room import require_writable, wait_for_room


@pytest.fixture
def written(monkeypatch):
    """Errors of the next writes, 0 for none; the last stays."""
    errors = [0]

    def write(folder, content):
        error = errors[0] if len(errors) == 1 else errors.pop(0)
        if error:
            raise OSError(error, os.strerror(error))
        return folder

    monkeypatch.setattr(room, "_write_nameless", write)
    monkeypatch.setattr(room, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(transient, "WAIT_SECONDS", 0.0)
    return errors


def test_room_that_comes_is_waited_for(tmp_path, written, caplog):
    written[:] = [errno.EDQUOT, errno.EDQUOT, 0]
    wait_for_room(tmp_path, 0)
    assert caplog.text.count("1,048,576 bytes more are needed; make room, this start waits") == 1


def test_without_room_for_small_files_the_start_fails_in_the_end(tmp_path, written, monkeypatch):
    monkeypatch.setattr(room, "WAIT_SECONDS", 0.0)
    written[:] = [errno.ENOSPC]
    with pytest.raises(RunFailedError, match="1,049,576 bytes more are needed; make room, then"):
        wait_for_room(tmp_path, 1000)


def test_without_room_for_a_checkpoint_training_goes_on(tmp_path, written, monkeypatch, caplog):
    monkeypatch.setattr(room, "WAIT_SECONDS", 0.0)
    wait_for_room(tmp_path, 1 << 62)
    assert "for a checkpoint; saves will fail until there is room" in caplog.text


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
