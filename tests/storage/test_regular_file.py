"""Paths that may be anything are read, or refused in one line."""

import os
from pathlib import Path

import pytest

from titan_loop.errors import UserError
from titan_loop.storage import regular_file, transient
from titan_loop.storage.regular_file import (
    DamagedFileError,
    open_regular,
    open_to_append,
    read_regular,
)


def test_a_file_may_be_as_large_as_the_limit(tmp_path: Path):
    path = tmp_path / "x"
    path.write_bytes(b"four")
    assert read_regular(path, fix="", most_bytes=4) == b"four"
    assert read_regular(path, fix="") == b"four"
    with pytest.raises(DamagedFileError, match=r"x is damaged \(more than 3 bytes\); delete it"):
        read_regular(path, fix="delete it", most_bytes=3)
    path.write_bytes(b"")
    assert read_regular(path, fix="", most_bytes=0) == b""
    assert regular_file.MOST_BYTES == 64 * 1024**2


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "x", fix="")
    with open_to_append(tmp_path / "x", fix="") as file:
        file.write(b"new")
    with open_to_append(tmp_path / "x", fix="") as file:
        assert file.read() == b"new"
        file.seek(0)
        file.write(b"er")
    assert (tmp_path / "x").read_bytes() == b"newer"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("folder", "not a regular file"),
        ("fifo", "not a regular file"),
        ("loop", "Too many levels of symbolic links"),
        ("file/x", "Not a directory"),
        ("x" * 300, "File name too long"),
    ],
)
def test_what_is_not_a_regular_file_is_damage(tmp_path: Path, name: str, reason: str):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DamagedFileError) as caught:
        open_regular(tmp_path / name, fix="delete it")
    assert (caught.value.reason, caught.value.fix) == (reason, "delete it")
    assert str(caught.value) == f"{tmp_path / name} is damaged ({reason}); delete it"
    assert len(os.listdir("/proc/self/fd")) <= opened


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path, flags: int, mode: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match=r"cannot be read or written \(Permission denied\); change"):
        open_regular(tmp_path / "x", fix="")


def test_a_short_read_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "x").write_bytes(b"four")
    sizes = iter([1, 4])

    class Short:
        def __init__(self, file) -> None:
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def fileno(self) -> int:
            return self.file.fileno()

        def read(self, most: int) -> bytes:
            return self.file.read(min(most, next(sizes)))

    whole = regular_file.open_regular
    monkeypatch.setattr(regular_file, "open_regular", lambda path, fix: Short(whole(path, fix=fix)))
    before = transient._retries
    assert read_regular(tmp_path / "x", fix="") == b"four"
    assert transient._retries == before + 1
