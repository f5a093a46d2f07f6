"""JSON files: atomic writes, and lines that survive a kill."""

import json
import math
from pathlib import Path

import pytest

from titan_loop.errors import UserError
from titan_loop.storage.json_files import append_jsonl, read_jsonl, read_versioned_json, write_json


def test_failed_write_keeps_the_old_file(tmp_path: Path):
    path = tmp_path / "x.json"
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
