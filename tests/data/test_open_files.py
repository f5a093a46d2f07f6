"""Files that stay open: values at an offset, the number of open files, and lost files."""

import errno
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from titan_loop.data import open_files
from titan_loop.data.open_files import OpenFiles, open_file_limit
from titan_loop.errors import UserError

U16 = np.dtype("<u2")


def write(path: Path, values: list[int]) -> str:
    np.array(values, dtype=U16).tofile(path)
    return str(path)


def test_values_are_read_from_an_offset(tmp_path: Path):
    path, files = write(tmp_path / "a", [5, 6, 7, 8]), OpenFiles(2)
    assert files.read(path, U16, 1, 2).tolist() == [6, 7]
    assert files.read(path, U16, 2, 2).tolist() == [7, 8]  # to the end
    assert files.read(path, U16, 0, 0).tolist() == []
    with pytest.raises(UserError, match="a ends before its value 5: it was truncated while it was"):
        files.read(path, U16, 2, 3)


def test_the_file_opened_first_is_closed_beyond_the_limit(tmp_path: Path):
    paths = [write(tmp_path / name, [number]) for number, name in enumerate("abc")]
    files = OpenFiles(2)
    for path in (*paths[:2], paths[0], paths[2]):
        files.read(path, U16, 0, 1)
    assert len(files) == 2
    assert list(files._descriptors) == paths[1:]
    files.close()
    assert len(files) == 0
    assert files.read(paths[0], U16, 0, 1).tolist() == [0]


def test_a_file_that_is_lost_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = OpenFiles(2)
    with pytest.raises(UserError, match="file /nowhere disappeared while it was in use: restore"):
        files.read("/nowhere", U16, 0, 1)
    path = write(tmp_path / "a", [1])

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match="check its disk and permissions"):
        files.read(path, U16, 0, 1)


def test_fewer_files_are_kept_where_the_system_has_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    paths = [write(tmp_path / name, [number]) for number, name in enumerate("abc")]
    files, whole = OpenFiles(9), os.open

    def few(path: str, flags: int, *rest: int) -> int:
        if len(files) >= 2:
            raise OSError(errno.EMFILE, "Too many open files", path)
        return whole(path, flags, *rest)

    monkeypatch.setattr(os, "open", few)
    assert [files.read(path, U16, 0, 1).tolist() for path in paths] == [[0], [1], [2]]
    assert (len(files), files._most) == (2, 2)


@pytest.mark.parametrize(
    ("soft", "hard", "limit", "raised"),
    [
        (1024, 4096, 4096, (4096, 4096)),
        (1024, 1 << 20, 65_536, (65_536, 1 << 20)),
        (4096, 4096, 4096, None),
        (1 << 17, 1 << 20, 65_536, None),
        (1024, resource.RLIM_INFINITY, 65_536, (65_536, resource.RLIM_INFINITY)),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 65_536, None),
    ],
)
def test_the_limit_is_raised_as_far_as_allowed(monkeypatch, soft, hard, limit, raised):
    changed: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: changed.append(limits))
    assert open_file_limit() == limit
    assert changed == ([] if raised is None else [raised])

    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert open_file_limit() == (limit if raised is None else soft)


@pytest.mark.parametrize(("allowed", "most"), [(65_536, 64_512), (2048, 1024), (1500, 750)])
def test_other_files_are_left_room(monkeypatch, allowed, most):
    monkeypatch.setattr(open_files, "open_file_limit", lambda: allowed)
    assert OpenFiles()._most == most
