"""Records of JSON lines and tables: what their text is, and what is repaired or dropped."""

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.data.shapes.shape import TEXTS, Rows, Shape, jsonl, parquet

_CHAT = [{"role": b"user", "content": b"a"}, {"role": b"assistant", "content": b"b"}]
_MESSAGES = pa.list_(pa.struct({"role": pa.binary(), "content": pa.binary()}))
_BYTES = [text.encode() for text in TEXTS]
_SAME_LENGTH = [b"seven 1", b"seven 2"]


def _json(line: str | bytes, **more: Any) -> Shape:
    """Return a row of one line after another record, "one"."""
    line = line.encode() if isinstance(line, str) else line
    return Shape({"a.jsonl": jsonl(["one"]) + line + b"\n"}, **more)


def _read(line: str, text: str, **repaired: int) -> Shape:
    return _json(line, train=("one", text), repaired=repaired)


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


ROWS: Rows = {
    # Records of JSON
    "NaN": _read('{"text": "two", "score": NaN}', "two", python_json=1),
    "-Infinity": _read('{"score": -Infinity, "text": "two"}', "two", python_json=1),
    "nested 1,500 deep": _read(
        '{"text": "two", "tree": ' + "[" * 1500 + "]" * 1500 + "}", "two", python_json=1
    ),
    "half a pair": _read(r'{"text": "two \ud83d."}', "two �.", python_json=1, half_surrogate=1),
    "half a pair in a title": _read(
        r'{"text": "two", "title": "\udc00"}', "two", python_json=1, half_surrogate=1
    ),
    "whole pair": _read(r'{"text": "two \ud83d\ude00"}', "two 😀"),
    "beyond 64 bits": _read('{"text": "two", "id": 123456789012345678901234567890}', "two"),
    "5,000 digits": _read(f'{{"text": "two", "id": {"1" * 5000}}}', "two", python_json=1),
    "EOS spelt out": _read('{"text": "a <|endoftext|> b"}', "a <|endoftext|> b"),
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
    "a string": _json('"two"', refused="line 2: not a JSON object"),
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
    "string": _table(pa.array(TEXTS, pa.string())),
    "large_string": _table(pa.array(TEXTS, pa.large_string())),
    "string_view": _table(pa.array(TEXTS, pa.string_view())),
    "binary": _table(pa.array(_BYTES, pa.binary())),
    "large_binary": _table(pa.array(_BYTES, pa.large_binary())),
    "binary_view": _table(pa.array(_BYTES, pa.binary_view())),
    "dictionary": _table(pa.array(TEXTS).dictionary_encode()),
    "binary dictionary": _table(pa.array(_BYTES, pa.binary()).dictionary_encode()),
    "fixed_size_binary": _table(pa.array(_SAME_LENGTH, pa.binary(7)), train=("seven 1", "seven 2")),
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
    "ORC's JSON": Shape(
        _copy("pyarrow", "tests/data/orc/TestOrcFile.test1.jsn.gz"),
        options={"text_key": "string1"},
        train=("hi", "bye"),
        warned=("1 file (TestOrcFile.test1.jsn.gz) will be trained on; if they are tests",),
    ),
    "ORC": Shape(
        _copy("pyarrow", "tests/data/orc/TestOrcFile.test1.orc"),
        inputs=("TestOrcFile.test1.orc",),
        refused=r"test1\.orc is neither text nor in a format",
    ),
    "lm-eval's JSON": Shape(
        _copy("lm_eval", "tasks/mmlu/flan_cot_fewshot/_cot_prompts.json"),
        refused="1 of 1 records .* no field 'text', only '.* and 49 more",
    ),
}
