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
    "Records of JSON": {
        "`NaN` in another field → read, and counted as `python_json`": _read(
            '{"text": "two", "score": NaN}', "two", python_json=1
        ),
        "`-Infinity` in another field → the same": _read(
            '{"score": -Infinity, "text": "two"}', "two", python_json=1
        ),
        "another field nested 1,500 deep → the same": _read(
            '{"text": "two", "tree": ' + "[" * 1500 + "]" * 1500 + "}", "two", python_json=1
        ),
        (
            "half a surrogate pair, `\\ud83d`, in the text → U+FFFD in its place; counted as"
            " `half_surrogate`, too"
        ): _read(r'{"text": "two \ud83d."}', "two �.", python_json=1, half_surrogate=1),
        "half a surrogate pair in a title → the same": _read(
            r'{"text": "two", "title": "\udc00"}', "two", python_json=1, half_surrogate=1
        ),
        "a whole surrogate pair, `\\ud83d\\ude00` → the character": _read(
            r'{"text": "two \ud83d\ude00"}', "two 😀"
        ),
        "a number beyond 64 bits in another field → read": _read(
            '{"text": "two", "id": 123456789012345678901234567890}', "two"
        ),
        "a number of 5,000 digits in another field → read, and counted as `python_json`": _read(
            f'{{"text": "two", "id": {"1" * 5000}}}', "two", python_json=1
        ),
        "`<|endoftext|>` spelt out in a text → text, not the token": _read(
            '{"text": "a <|endoftext|> b"}', "a <|endoftext|> b"
        ),
        "another field with the text, and `--text-key body` → the field `body`": _json(
            '{"text": 5, "body": "two"}',
            options={"text_key": "body"},
            train=("two",),
            dropped={"missing_text": 1},
        ),
        "a text that is empty or white space → dropped and counted as `empty`": _dropped(
            r'{"text": " \n"}', "empty"
        ),
        "a text that is a number or a list → dropped and counted as `malformed`": _dropped(
            '{"text": 5}', "malformed"
        ),
        "a record that is not an object → dropped and counted as `malformed`": _dropped(
            "[1, 2]", "malformed"
        ),
        "a line with bytes that are not UTF-8 → dropped and counted as `malformed`": _dropped(
            b'{"text": "\xff"}', "malformed"
        ),
        (
            "a record that is a string → refused above `--max-malformed`; the message names"
            " the line"
        ): _json('"two"', refused="line 2: not a JSON object"),
        (
            "a line that was cut off → refused above `--max-malformed`; the message names "
            "the line and the column"
        ): _json(
            '{"text": "tw',
            refused=r"a\.jsonl, line 2: not JSON: Unterminated string starting at, column 10",
        ),
        "a text that is `null` → the same": _json(
            '{"text": null}', refused=r"1 of 2 records .* line 2: 'text' is null"
        ),
        "a record without the field → the same; the message names its fields": _json(
            '{"content": "two", "id": 2}', refused=r"line 2: no field 'text', only 'content', 'id'"
        ),
        (
            "an array with an element that is no object, and with `NaN` → dropped as "
            "`malformed`, and counted as `python_json`"
        ): Shape(
            {"a.json": '[{"text": "one", "score": NaN}, 2]'},
            train=("one",),
            dropped={"malformed": 1},
            repaired={"python_json": 1},
        ),
    },
    "Records of tables": {
        "`string` → text": _table(pa.array(TEXTS, pa.string())),
        "`large_string` → text": _table(pa.array(TEXTS, pa.large_string())),
        "`string_view` → text": _table(pa.array(TEXTS, pa.string_view())),
        "`binary`, as Impala, Hive and older Spark write text → text": _table(
            pa.array(_BYTES, pa.binary())
        ),
        "`large_binary` → text": _table(pa.array(_BYTES, pa.large_binary())),
        "`binary_view` → text": _table(pa.array(_BYTES, pa.binary_view())),
        "a dictionary of strings → text": _table(pa.array(TEXTS).dictionary_encode()),
        "a dictionary of `binary` → text": _table(
            pa.array(_BYTES, pa.binary()).dictionary_encode()
        ),
        "`fixed_size_binary` → text": _table(
            pa.array(_SAME_LENGTH, pa.binary(7)), train=("seven 1", "seven 2")
        ),
        "bytes that are not UTF-8 → dropped and counted as `malformed`": _table(
            pa.array([b"one", b"\xff"], pa.binary()), train=("one",), dropped={"malformed": 1}
        ),
        "a `string` with bytes that are not UTF-8 → the same; the other rows stay": _table(
            # Arrow does not look at the bytes when it is told that they are text.
            pa.Array.from_buffers(
                pa.string(), 3, pa.array([b"one", b"\xff", b"two"], pa.binary()).buffers()
            ),
            train=("one", "two"),
            dropped={"malformed": 1},
        ),
        "nulls, and empty strings → dropped and counted as `missing_text` and `empty`": _table(
            pa.array(["one", None, ""]), train=("one",), dropped={"missing_text": 1, "empty": 1}
        ),
        ("a table without the column → refused: the message names the columns that it has"): Shape(
            {"a.parquet": parquet({"body": ["one"], "id": [1]})},
            refused="1 of 1 records .* row 1: no field 'text', only 'body', 'id'",
        ),
        (
            "a column of Parquet's type JSON: a text and an object → the text that the JSON"
            " writes; the object is counted as `malformed`"
        ): Shape(
            ({"a.parquet": parquet({"text": pa.array(['"one\\n"', '{"a": 1}'], pa.json_())})}),
            train=("one\n",),
            dropped={"malformed": 1},
        ),
        (
            "conversations in `binary`, beside times in nanoseconds → ChatML; a time that "
            "Python cannot hold costs nothing"
        ): Shape(
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
    },
    "Files of other packages": {
        (
            "a Parquet file that pyarrow 0.7.1 wrote in 2017, and `--text-key cut` → the column"
        ): Shape(
            _copy("pyarrow", "tests/data/parquet/v0.7.1.parquet"),
            options={"text_key": "cut"},
            train=("Ideal", *["Premium"] * 2, *["Good"] * 2, *["Very Good"] * 4, "Fair"),
        ),
        (
            "JSON lines that Apache ORC's tests call `….jsn.gz`, and `--text-key string1` →"
            " the field"
        ): Shape(
            _copy("pyarrow", "tests/data/orc/TestOrcFile.test1.jsn.gz"),
            options={"text_key": "string1"},
            train=("hi", "bye"),
            warned=("1 file (TestOrcFile.test1.jsn.gz) will be trained on; if they are tests",),
        ),
        "an ORC file → refused": Shape(
            _copy("pyarrow", "tests/data/orc/TestOrcFile.test1.orc"),
            inputs=("TestOrcFile.test1.orc",),
            refused=r"test1\.orc is neither text nor in a format",
        ),
        (
            "lm-evaluation-harness's JSON of one object, without a field of text → refused;"
            " the message names its fields"
        ): Shape(
            _copy("lm_eval", "tasks/mmlu/flan_cot_fewshot/_cot_prompts.json"),
            refused="1 of 1 records .* no field 'text', only '.* and 49 more",
        ),
    },
}
