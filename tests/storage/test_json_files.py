"""JSON files: atomic writes, and lines that survive a kill."""

import errno
import json
import math
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from titan_loop.errors import UserError
from titan_loop.storage.json_files import (
    append_jsonl,
    count,
    finite_or_null,
    nested,
    number,
    read_json_object,
    read_jsonl,
    read_versioned_json,
    write_json,
)


def test_failed_write_keeps_the_old_file(tmp_path: Path):
    path = tmp_path / "x.json"
    # Of a killed process: in a container every start may have the same process id.
    (tmp_path / f".x.json.{os.getpid()}-{threading.get_ident()}").write_text("half")
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_truncated_last_line_is_skipped_then_removed(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    assert read_jsonl(path) == []
    append_jsonl(path, {"step": 1, "loss": math.nan})
    append_jsonl(path, {"step": 2})
    path.write_bytes(path.read_bytes()[:-5])
    assert read_jsonl(path) == [{"step": 1, "loss": None}]
    append_jsonl(path, {"step": 2, "again": True})
    assert read_jsonl(path) == [{"step": 1, "loss": None}, {"step": 2, "again": True}]


def test_a_file_from_an_editor_has_every_line(tmp_path: Path):
    """It may begin with a byte order mark, and end without a line break."""
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}', encoding="utf-8-sig")
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


FAULTS: dict[str, Callable[[Path], object]] = {
    "half": lambda path: path.write_text("{"),
    "an array": lambda path: path.write_text("[]"),
    "no version": lambda path: path.write_text('{"version": 1}'),
    "nested": lambda path: path.write_text('{"a":' * 100_000 + "1" + "}" * 100_000),
    "huge integer": lambda path: path.write_text('{"format_version": ' + "9" * 5000 + "}"),
    "infinite": lambda path: path.write_text('{"format_version": 1e999}'),
    "not UTF-8": lambda path: path.write_bytes(b'{"a": "\xff"}'),
    "folder": Path.mkdir,
    "link loop": lambda path: path.symlink_to(path),
    "below a file": lambda path: (path.parent / "x.json").touch() or path.symlink_to("x.json/y"),
    "terabyte": lambda path: path.touch() or os.truncate(path, 1 << 40),
}


@pytest.mark.parametrize("spoil", FAULTS.values(), ids=FAULTS)
def test_what_holds_no_json_object_of_this_version_is_one_line(tmp_path: Path, spoil):
    spoil(tmp_path / "record.json")
    with pytest.raises(UserError, match=r"record\.json is damaged \(.+\); move it away$") as caught:
        read_versioned_json(tmp_path / "record.json", format_version=2, fix="move it away")
    assert len(str(caught.value)) < 500


def test_a_version_from_the_future_is_refused(tmp_path: Path):
    write_json(tmp_path / "x.json", {"format_version": 3, "a": 1})
    assert read_versioned_json(tmp_path / "x.json", format_version=3, fix="")["a"] == 1
    with pytest.raises(UserError, match="version 3, this titan_loop reads up to 2; upgrade"):
        read_versioned_json(tmp_path / "x.json", format_version=2, fix="")


@pytest.mark.parametrize("line", [b'{"st', b"5", b'{"a":' * 100_000, b'{"step": "1"}', b"\xff"])
def test_a_wrong_line_in_the_middle_is_named(tmp_path: Path, line: bytes):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(UserError, match=r"line 2 .*; remove that line"):
        read_jsonl(path, {"step": int})


def test_a_read_that_fails_or_is_short_is_tried_again(tmp_path: Path, monkeypatch):
    write_json(tmp_path / "x.json", {"a": 1})
    opened, size, faults = Path.open, os.fstat, [errno.EIO, errno.ESTALE]

    def flaky(path: Path, mode: str) -> object:
        if faults:
            raise OSError(fault := faults.pop(), os.strerror(fault))
        return opened(path, mode)

    def longer(descriptor: int) -> SimpleNamespace:  # the file has more than is read
        monkeypatch.setattr(os, "fstat", size)
        return SimpleNamespace(st_size=size(descriptor).st_size + 1)

    monkeypatch.setattr(Path, "open", flaky)
    monkeypatch.setattr(os, "fstat", longer)
    assert read_json_object(tmp_path / "x.json", fix="") == {"a": 1}
    assert not faults


def test_a_failing_disk_is_not_damage(tmp_path: Path, monkeypatch):
    def fail(path: Path, mode: str) -> object:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with pytest.raises(FileNotFoundError):
        read_json_object(tmp_path / "missing.json", fix="")
    write_json(tmp_path / "x.json", {})
    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(OSError, match="Input/output error"):
        read_json_object(tmp_path / "x.json", fix="")


def test_numbers_of_a_file_are_finite_and_counts_fit_64_bits():
    values = (0, 2.5, -sys.float_info.max)
    assert tuple(map(number, values)) == values
    assert math.isnan(number(None))
    assert [*map(count, (0, 2**63 - 1))] == [0, 2**63 - 1]
    for read, wrong in (
        (number, (True, "1", [1], math.inf, math.nan, 10**400)),
        (count, (-1, 2**63, 1.0, True, None, "1")),
    ):
        for value in wrong:
            with pytest.raises(TypeError, match=r"is not a number( from 0 on)?$"):
                read(value)


def test_nested_values_are_found_and_made_finite():
    record = {"a": {"b": {"c": 1}}, "d": None}
    names = ("a.b.c", "a.x.c", "d.c", "a.b.c.e")
    assert [nested(record, name) for name in names] == [1, None, None, None]
    value = {"a": [1.5, math.inf, (math.nan,)], "b": "inf", "c": {"d": -math.inf}}
    assert finite_or_null(value) == {"a": [1.5, None, [None]], "b": "inf", "c": {"d": None}}
