"""Records of JSON lines and tables: what their text is, and what is repaired or dropped."""

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.data.shapes.shape import Shape
from tests.data.shapes.writing import TEXTS, files, jsonl, parquet

_JSON = "Records of JSON"
_TABLES = "Records of tables"
_HALF = {"max_malformed": 0.5}
_CHAT = [{"role": b"user", "content": b"a"}, {"role": b"assistant", "content": b"b"}]
_MESSAGES = pa.list_(pa.struct({"role": pa.binary(), "content": pa.binary()}))


def _json(found: str, taken: str, line: str | bytes, **more: Any) -> Shape:
    """Return a row of one line after another record, "one"."""
    content = jsonl(["one"]) + (line.encode() if isinstance(line, str) else line) + b"\n"
    return Shape(section=_JSON, found=found, taken=taken, make=files({"a.jsonl": content}), **more)


def _dropped(found: str, line: str | bytes, kind: str) -> Shape:
    return _json(
        found,
        f"dropped and counted as `{kind}`",
        line,
        options=_HALF,
        train=("one",),
        dropped={kind: 1},
        warned=(f"dropped 1 {kind} of 2 records",),
    )


def _refused(found: str, taken: str, line: str | bytes, words: str) -> Shape:
    return _json(found, taken, line, refused=words)


def _table(found: str, text: Any, **more: Any) -> Shape:
    options = {"taken": "text", "train": TEXTS, **more}
    make = files({"a.parquet": parquet({"text": text, "id": list(range(len(text)))})})
    return Shape(section=_TABLES, found=found, make=make, **options)


_BYTES = [text.encode() for text in TEXTS]
_SAME_LENGTH = [text.encode()[:7] for text in ("seven 1", "seven 2")]

_OTHERS = "Files of other packages"


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


ROWS = (
    _json(
        "`NaN` in another field",
        "read, and counted as `python_json`",
        '{"text": "two", "score": NaN}',
        train=("one", "two"),
        repaired={"python_json": 1},
    ),
    _json(
        "`-Infinity` in another field",
        "the same",
        '{"score": -Infinity, "text": "two"}',
        train=("one", "two"),
        repaired={"python_json": 1},
    ),
    _json(
        "another field nested 1,500 deep",
        "the same",
        '{"text": "two", "tree": ' + "[" * 1500 + "]" * 1500 + "}",
        train=("one", "two"),
        repaired={"python_json": 1},
    ),
    _json(
        r"half a surrogate pair, `\ud83d`, in the text",
        "U+FFFD in its place; counted as `half_surrogate`, too",
        r'{"text": "two \ud83d."}',
        train=("one", "two �."),
        repaired={"python_json": 1, "half_surrogate": 1},
    ),
    _json(
        "half a surrogate pair in a title",
        "the same",
        r'{"text": "two", "title": "\udc00"}',
        train=("one", "two"),
        repaired={"python_json": 1, "half_surrogate": 1},
    ),
    _json(
        r"a whole surrogate pair, `\ud83d\ude00`",
        "the character",
        r'{"text": "two \ud83d\ude00"}',
        train=("one", "two 😀"),
    ),
    _json(
        "a number beyond 64 bits in another field",
        "read",
        '{"text": "two", "id": 123456789012345678901234567890}',
        train=("one", "two"),
    ),
    _json(
        "a number of 5,000 digits in another field",
        "read, and counted as `python_json`",
        f'{{"text": "two", "id": {"1" * 5000}}}',
        train=("one", "two"),
        repaired={"python_json": 1},
    ),
    _json(
        "`<|endoftext|>` spelt out in a text",
        "text, not the token",
        '{"text": "a <|endoftext|> b"}',
        train=("one", "a <|endoftext|> b"),
    ),
    _json(
        "another field with the text, and `--text-key body`",
        "the field `body`",
        '{"text": 5, "body": "two"}',
        options={"text_key": "body", **_HALF},
        train=("two",),
        dropped={"missing_text": 1},
        warned=("dropped 1 missing_text of 2 records",),
    ),
    _dropped("a text that is empty or white space", r'{"text": " \n"}', "empty"),
    _dropped("a text that is a number or a list", '{"text": 5}', "malformed"),
    _dropped("a record that is not an object", "[1, 2]", "malformed"),
    _dropped("a line with bytes that are not UTF-8", b'{"text": "\xff"}', "malformed"),
    _refused(
        "a record that is a string",
        "refused above `--max-malformed`; the message names the line",
        '"two"',
        "line 2: not a JSON object",
    ),
    _refused(
        "a line that was cut off",
        "refused above `--max-malformed`; the message names the line and the column",
        '{"text": "tw',
        r"a\.jsonl, line 2: not JSON: Unterminated string starting at, column 10",
    ),
    _refused(
        "a text that is `null`",
        "the same",
        '{"text": null}',
        r"1 of 2 records .* line 2: 'text' is null",
    ),
    _refused(
        "a record without the field",
        "the same; the message names its fields",
        '{"content": "two", "id": 2}',
        r"line 2: no field 'text', only 'content', 'id'",
    ),
    Shape(
        section=_JSON,
        found="an array with an element that is no object, and with `NaN`",
        taken="dropped as `malformed`, and counted as `python_json`",
        make=files({"a.json": '[{"text": "one", "score": NaN}, 2]'}),
        options=_HALF,
        train=("one",),
        dropped={"malformed": 1},
        repaired={"python_json": 1},
        warned=("dropped 1 malformed of 2 records",),
    ),
    _table("`string`", pa.array(TEXTS, pa.string())),
    _table("`large_string`", pa.array(TEXTS, pa.large_string())),
    _table("`string_view`", pa.array(TEXTS, pa.string_view())),
    _table("`binary`, as Impala, Hive and older Spark write text", pa.array(_BYTES, pa.binary())),
    _table("`large_binary`", pa.array(_BYTES, pa.large_binary())),
    _table("`binary_view`", pa.array(_BYTES, pa.binary_view())),
    _table("a dictionary of strings", pa.array(TEXTS).dictionary_encode()),
    _table("a dictionary of `binary`", pa.array(_BYTES, pa.binary()).dictionary_encode()),
    _table(
        "`fixed_size_binary`",
        pa.array(_SAME_LENGTH, pa.binary(7)),
        train=("seven 1", "seven 2"),
    ),
    _table(
        "bytes that are not UTF-8",
        pa.array([b"one", b"\xff"], pa.binary()),
        taken="dropped and counted as `malformed`",
        options=_HALF,
        train=("one",),
        dropped={"malformed": 1},
        warned=("dropped 1 malformed of 2 records",),
    ),
    _table(
        "a `string` with bytes that are not UTF-8",
        # Arrow does not look at the bytes when it is told that they are text.
        pa.Array.from_buffers(
            pa.string(), 3, pa.array([b"one", b"\xff", b"two"], pa.binary()).buffers()
        ),
        taken="the same; the other rows stay",
        options=_HALF,
        train=("one", "two"),
        dropped={"malformed": 1},
        warned=("dropped 1 malformed of 3 records",),
    ),
    _table(
        "nulls, and empty strings",
        pa.array(["one", None, ""]),
        taken="dropped and counted as `missing_text` and `empty`",
        options=_HALF,
        train=("one",),
        dropped={"missing_text": 1, "empty": 1},
        warned=("dropped 1 missing_text, 1 empty of 3 records",),
    ),
    Shape(
        section=_TABLES,
        found="a table without the column",
        taken="refused: the message names the columns that it has",
        make=files({"a.parquet": parquet({"body": ["one"], "id": [1]})}),
        refused="1 of 1 records .* row 1: no field 'text', only 'body', 'id'",
    ),
    Shape(
        section=_TABLES,
        found="a column of Parquet's type JSON: a text and an object",
        taken="the text that the JSON writes; the object is counted as `malformed`",
        make=files(
            {"a.parquet": parquet({"text": pa.array(['"one\\n"', '{"a": 1}'], pa.json_())})}
        ),
        options=_HALF,
        train=("one\n",),
        dropped={"malformed": 1},
        warned=("dropped 1 malformed of 2 records",),
    ),
    Shape(
        section=_TABLES,
        found="conversations in `binary`, beside times in nanoseconds",
        taken="ChatML; a time that Python cannot hold costs nothing",
        make=files(
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
    Shape(
        section=_OTHERS,
        found="a Parquet file that pyarrow 0.7.1 wrote in 2017, and `--text-key cut`",
        taken="the column",
        make=_copy("pyarrow", "tests/data/parquet/v0.7.1.parquet"),
        options={"text_key": "cut"},
        train=("Ideal", *["Premium"] * 2, *["Good"] * 2, *["Very Good"] * 4, "Fair"),
    ),
    Shape(
        section=_OTHERS,
        found="JSON lines that Apache ORC's tests call `….jsn.gz`, and `--text-key string1`",
        taken="the field",
        make=_copy("pyarrow", "tests/data/orc/TestOrcFile.test1.jsn.gz"),
        options={"text_key": "string1"},
        train=("hi", "bye"),
        warned=("1 file (TestOrcFile.test1.jsn.gz) will be trained on; if they are tests",),
    ),
    Shape(
        section=_OTHERS,
        found="an ORC file",
        taken="refused",
        make=_copy("pyarrow", "tests/data/orc/TestOrcFile.test1.orc"),
        inputs=("TestOrcFile.test1.orc",),
        refused=r"test1\.orc is neither text nor in a format",
    ),
    Shape(
        section=_OTHERS,
        found="lm-evaluation-harness's JSON of one object, without a field of text",
        taken="refused; the message names its fields",
        make=_copy("lm_eval", "tasks/mmlu/flan_cot_fewshot/_cot_prompts.json"),
        refused="1 of 1 records .* no field 'text', only '.* and 49 more",
    ),
)
