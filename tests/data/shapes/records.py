"""Records of JSON lines and tables: what their text is, and what is repaired or dropped."""

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.data.shapes.shape import Rows, Shape, jsonl, parquet

_CHAT = [{"role": b"user", "content": b"a"}, {"role": b"assistant", "content": b"b"}]
_MESSAGES = pa.list_(pa.struct({"role": pa.binary(), "content": pa.binary()}))


def _json(line: str | bytes, **more: Any) -> Shape:
    """Return a row of one line after another record, "one"."""
    line = line.encode() if isinstance(line, str) else line
    return Shape({"a.jsonl": jsonl(["one"]) + line + b"\n"}, **more)


def _dropped(line: str | bytes, kind: str) -> Shape:
    return _json(line, train=("one",), dropped={kind: 1})


def _table(text: Any, **more: Any) -> Shape:
    return Shape({"a.parquet": parquet({"text": text, "id": [*range(len(text))]})}, **more)


def _copy(package: str, name: str) -> Callable[[Path], None]:
    """Return a function that copies a file of an installed package into a folder."""

    def copy(folder: Path) -> None:
        found = find_spec(package)
        places = [] if found is None else [*(found.submodule_search_locations or [])]
        path = Path(*places[:1], name)
        if not path.is_file():
            pytest.skip(f"{package} has no {name} here")
        shutil.copy(path, folder)

    return copy


_READ = (
    '{"text": "NaN", "score": NaN}',
    '{"score": -Infinity, "text": "-Infinity"}',
    '{"text": "nested", "tree": ' + "[" * 1500 + "]" * 1500 + "}",
    f'{{"text": "digits", "id": {"1" * 5000}}}',
    r'{"text": "half \ud83d."}',
    r'{"text": "title", "title": "\udc00"}',
    r'{"text": "whole \ud83d\ude00"}',
    '{"text": "64 bits", "id": 123456789012345678901234567890}',
    '{"text": "a <|endoftext|> b"}',
)
_TYPES = {
    "string": pa.array(["string"], pa.string()),
    "large_string": pa.array(["large_string"], pa.large_string()),
    "string_view": pa.array(["string_view"], pa.string_view()),
    "binary": pa.array([b"binary"], pa.binary()),
    "large_binary": pa.array([b"large_binary"], pa.large_binary()),
    "binary_view": pa.array([b"binary_view"], pa.binary_view()),
    "dictionary": pa.array(["dictionary"]).dictionary_encode(),
    "binary dictionary": pa.array([b"binary dictionary"], pa.binary()).dictionary_encode(),
    "fixed_size_binary": pa.array([b"fixed_size_binary"], pa.binary(17)),
}

ROWS: Rows = {
    # Records of JSON
    "Python's JSON": Shape(
        {"a.jsonl": "\n".join(_READ)},
        train=(
            *("NaN", "-Infinity", "nested", "digits", "half �.", "title", "whole 😀", "64 bits"),
            "a <|endoftext|> b",
        ),
        repaired={"python_json": 6, "half_surrogate": 2},
    ),
    "text-key": _json(
        '{"text": 5, "body": "two"}',
        options={"text_key": "body"},
        train=("two",),
        dropped={"missing_text": 1},
    ),
    "no text": _dropped(r'{"text": " \n"}', "empty"),
    "a number": _dropped('{"text": 5}', "malformed"),
    "not an object": _dropped("[1, 2]", "malformed"),
    "not UTF-8": _dropped(b'{"text": "\xff"}', "malformed"),
    "cut-off line": _json(
        '{"text": "tw',
        refused=r"a\.jsonl, line 2: not JSON: Unterminated string starting at, column 10",
    ),
    "null": _json('{"text": null}', refused=r"1 of 2 records .* line 2: 'text' is null"),
    "no field": _json(
        '{"content": "two", "id": 2}', refused=r"line 2: no field 'text', only 'content', 'id'"
    ),
    "array with a number": Shape(
        {"a.json": '[{"text": "one", "score": NaN}, 2]'},
        train=("one",),
        dropped={"malformed": 1},
        repaired={"python_json": 1},
    ),
    # Records of tables
    "types of text": Shape(
        {f"{name}.parquet": parquet({"text": text}) for name, text in _TYPES.items()},
        train=tuple(_TYPES),
    ),
    "binary, not UTF-8": _table(
        pa.array([b"one", b"\xff"], pa.binary()), train=("one",), dropped={"malformed": 1}
    ),
    "string, not UTF-8": _table(
        # Arrow does not look at the bytes when it is told that they are text.
        pa.Array.from_buffers(
            pa.string(), 3, pa.array([b"one", b"\xff", b"two"], pa.binary()).buffers()
        ),
        train=("one", "two"),
        dropped={"malformed": 1},
    ),
    "nulls": _table(
        pa.array(["one", None, ""]), train=("one",), dropped={"missing_text": 1, "empty": 1}
    ),
    "no column": Shape(
        {"a.parquet": parquet({"body": ["one"], "id": [1]})},
        refused="1 of 1 records .* row 1: no field 'text', only 'body', 'id'",
    ),
    "JSON column": Shape(
        ({"a.parquet": parquet({"text": pa.array(['"one\\n"', '{"a": 1}'], pa.json_())})}),
        train=("one\n",),
        dropped={"malformed": 1},
    ),
    "binary chats": Shape(
        (
            {
                "a.parquet": parquet(
                    {
                        "messages": pa.array([_CHAT], _MESSAGES),
                        "at": pa.array([1_700_000_000_000_000_001], pa.timestamp("ns")),
                    }
                )
            }
        ),
        options={"chat": True},
        train=("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n",),
        targets=("b<|im_end|>",),
    ),
    # Files of other packages
    "pyarrow 0.7.1": Shape(
        _copy("pyarrow", "tests/data/parquet/v0.7.1.parquet"),
        options={"text_key": "cut"},
        train=("Ideal", *["Premium"] * 2, *["Good"] * 2, *["Very Good"] * 4, "Fair"),
    ),
    "ORC": Shape(
        _copy("pyarrow", "tests/data/orc/TestOrcFile.test1.orc"),
        inputs=("TestOrcFile.test1.orc",),
        refused=r"test1\.orc is neither text nor in a format",
    ),
}
