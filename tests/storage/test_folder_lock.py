"""A lock left behind: by a start of the same job on a host that is gone, or by anybody else."""

import errno
import subprocess
import sys

import pytest

from titan_loop.errors import UserError
from titan_loop.storage import folder_lock
from titan_loop.storage.folder_lock import FolderLock, is_held

HOLDER = """
import socket, sys
from pathlib import Path
socket.gethostname = lambda: "gone"
from titan_loop.storage.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), "run.lock", called="x", user="run")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("job", "taken"), [("7", True), ("8", False), (None, False)])
def test_only_another_start_of_the_same_job_takes_over_the_lock_of_another_host(
    tmp_path, monkeypatch, caplog, job, taken
):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        if job is None:
            monkeypatch.delenv("SLURM_JOB_ID")
        else:
            monkeypatch.setenv("SLURM_JOB_ID", job)
        if taken:
            with FolderLock(tmp_path, "run.lock", called="x", user="run"):
                assert "was left by an earlier start of this job (process" in caplog.text
                with pytest.raises(UserError, match="in use by another run"):
                    subprocess_lock(tmp_path)
        else:
            with pytest.raises(UserError, match=r"in use by another run \(process \d+ on gone"):
                FolderLock(tmp_path, "run.lock", called="x", user="run")
            assert is_held(tmp_path / "run.lock") is True


def test_a_lock_that_nobody_has_is_not_held(tmp_path):
    assert is_held(tmp_path / "run.lock") is False
    FolderLock(tmp_path, "run.lock", called="x", user="run").release()
    assert is_held(tmp_path / "run.lock") is False
    assert is_held(tmp_path) is None


def test_a_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(file: object, flags: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder_lock.fcntl, "lockf", refuse)
    with FolderLock(tmp_path, "run.lock", called="x", user="run"):
        assert "a second run there will not be noticed" in caplog.text


def subprocess_lock(folder):
    """Try to lock in another process; raise what it says."""
    done = subprocess.run(
        [sys.executable, "-c", HOLDER, str(folder)], input="", capture_output=True, text=True,
        env={"PATH": ""}, check=False,
    )  # fmt: skip
    raise UserError(done.stderr)
