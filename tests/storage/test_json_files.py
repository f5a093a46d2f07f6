"""JSON files: atomic writes, and lines that survive a kill."""

import errno
import json
import math
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

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
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_killed_process_of_the_same_number_leaves_nothing_in_the_way(tmp_path: Path):
    # In a container every start may have the same process id.
    (tmp_path / f".x.json.{os.getpid()}-{threading.get_ident()}").write_text("half")
    write_json(tmp_path / "x.json", {"a": 1})
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


def test_broken_line_in_the_middle_is_named(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match="line 2"):
        read_jsonl(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged (.*); move it away"),
        ("[]", "is damaged (.*); move it away"),
        ('{"version": 1}', "is damaged (.*format_version.*); move it away"),
        ('{"format_version": 3}', "has format version 3, this titan_loop reads up to 2; upgrade"),
    ],
)
def test_a_versioned_file_that_cannot_be_read_is_one_line(tmp_path, text, message):
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_versioned_json(path, format_version=2, fix="move it away")
    path.write_text('{"format_version": 2, "a": 1}')
    assert read_versioned_json(path, format_version=2, fix="")["a"] == 1


FAULTS: dict[str, Callable[[Path], object]] = {
    "nested": lambda path: path.write_text('{"a":' * 100_000 + "1" + "}" * 100_000),
    "nested less": lambda path: path.write_text('{"a":' * 500 + "1" + "}" * 500),
    "huge integer": lambda path: path.write_text('{"format_version": ' + "9" * 5000 + "}"),
    "infinite": lambda path: path.write_text('{"format_version": 1e999}'),
    "not UTF-8": lambda path: path.write_bytes(b'{"a": "\xff"}'),
    "a number": lambda path: path.write_text("5"),
    "FIFO": os.mkfifo,
    "folder": Path.mkdir,
    "link loop": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("spoil", FAULTS.values(), ids=FAULTS)
def test_what_holds_no_json_object_is_one_line(tmp_path: Path, spoil):
    one, lines = tmp_path / "record.json", tmp_path / "m.jsonl"
    spoil(one)
    with pytest.raises(UserError, match=r"record\.json is damaged \(.+\); move it away$") as caught:
        read_versioned_json(one, format_version=2, fix="move it away")
    assert len(str(caught.value)) < 500
    spoil(lines)
    if lines.is_file():
        lines.write_bytes(lines.read_bytes() + b"\n")
    with pytest.raises(UserError, match=r"m\.jsonl('? line 1| is damaged).*; (remove|move)"):
        read_jsonl(lines, {"step": int})


def test_a_sparse_file_is_refused_before_it_fills_the_memory(tmp_path: Path):
    (tmp_path / "x.json").touch()
    os.truncate(tmp_path / "x.json", 1 << 40)
    with pytest.raises(UserError, match="more than"):
        read_json_object(tmp_path / "x.json", fix="")
    os.mkfifo(tmp_path / "fifo.jsonl")
    with pytest.raises(UserError, match="not a regular file"):
        append_jsonl(tmp_path / "fifo.jsonl", {"a": 1})


def test_a_failing_disk_is_not_damage(tmp_path: Path, monkeypatch):
    def fail(path: Path, flags: int, mode: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    write_json(tmp_path / "x.json", {})
    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(OSError, match="Input/output error"):
        read_json_object(tmp_path / "x.json", fix="")
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError):
        read_json_object(tmp_path / "missing.json", fix="")


def test_numbers_of_a_file_are_finite_and_counts_fit_64_bits():
    assert [number(value) for value in (0, 2.5, -sys.float_info.max)] == [
        0,
        2.5,
        -sys.float_info.max,
    ]
    assert math.isnan(number(None))
    for value in (True, "1", [1], math.inf, math.nan, 10**400):
        with pytest.raises(TypeError, match=r"is not a number$"):
            number(value)
    assert [count(value) for value in (0, 2**63 - 1)] == [0, 2**63 - 1]
    for value in (-1, 2**63, 1.0, True, None, "1"):
        with pytest.raises(TypeError, match=r"is not a number from 0 on$"):
            count(value)


def test_nested_values_are_found_and_made_finite():
    record = {"a": {"b": {"c": 1}}, "d": None}
    assert [nested(record, name) for name in ("a.b.c", "a.x.c", "d.c", "a.b.c.e")] == [
        *(1, None, None, None),
    ]
    value = {"a": [1.5, math.inf, (math.nan,)], "b": "inf", "c": {"d": -math.inf}}
    assert finite_or_null(value) == {"a": [1.5, None, [None]], "b": "inf", "c": {"d": None}}
