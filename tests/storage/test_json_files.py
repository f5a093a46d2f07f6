"""JSON files: atomic writes, and lines that survive a kill."""

import json
import math
from pathlib import Path

import pytest

from titan_loop.errors import UserError
from titan_loop.storage.json_files import append_jsonl, read_jsonl, write_json


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
