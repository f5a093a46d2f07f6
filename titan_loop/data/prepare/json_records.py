"""JSON as people have it: by orjson, and by Python's `json` where orjson is stricter.

Python writes NaN, Infinity and halves of surrogate pairs into JSON, and nests as deep as it likes.
"""

import codecs
import json
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import orjson

LENIENT, HALF_SURROGATE = "python_json", "half_surrogate"
"""Repairs: read as Python writes it; halves of surrogate pairs replaced by U+FFFD."""

_DEEPEST = 200  # `json` raises RecursionError below a thousand, less the frames of its caller
_HALF = re.compile("[\ud800-\udfff]")
_MARK = re.compile(r'"(?:[^"\\]++|\\.)*+"|[\[{]|[\]}]', re.DOTALL)
_SPACE = re.compile(r"\s*")


def _integer(digits: str) -> int | float:
    """Return a number, as a float where Python reads so many digits no longer."""
    return int(digits) if len(digits) < sys.int_info.str_digits_check_threshold else float(digits)


_DECODER = json.JSONDecoder(parse_int=_integer)


class Parsed(NamedTuple):
    """A JSON value, and how it was repaired."""

    value: Any
    repairs: tuple[str, ...] = ()


def parse_json(content: bytes) -> Parsed:
    """Read one JSON value; raise `ValueError` that says what is wrong, and in which column."""
    try:
        return Parsed(orjson.loads(content))
    except orjson.JSONDecodeError:
        pass
    text = _decoded(content)
    try:
        try:
            return _without_halves(_DECODER.decode(text))
        except RecursionError:
            return _without_halves(_DECODER.decode(_shallow(text)))
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}, column {error.pos + 1}") from None


def parse_values(content: bytes) -> Iterator[Parsed]:
    """Yield the records of a file: an array's elements, or one value after another."""
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        values = [orjson.loads(content)]
    except orjson.JSONDecodeError:
        values = _one_after_another(_shallow(_decoded(content)))
        written = (json.dumps(record).encode() for record in _records(values))
        yield from map(parse_json, written)  # which says how each one was repaired
    else:
        yield from map(Parsed, _records(values))


def _records(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, list) else [value]


def _one_after_another(text: str) -> Iterator[Any]:
    at = _end_of_space(text, 0)
    while at < len(text):
        try:
            value, at = _DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error.msg}, line {error.lineno}") from None
        yield value
        at = _end_of_space(text, at)


def _end_of_space(text: str, start: int) -> int:
    space = _SPACE.match(text, start)
    return start if space is None else space.end()


def _decoded(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8, column {error.start + 1}") from None


def _without_halves(value: Any) -> Parsed:
    """Replace halves of surrogate pairs, which UTF-8 cannot hold."""
    written = json.dumps(value, ensure_ascii=False)
    if not _HALF.search(written):
        return Parsed(value, (LENIENT,))
    whole = written.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return Parsed(json.loads(whole), (LENIENT, HALF_SURROGATE))


def _shallow(text: str) -> str:
    """Return JSON in which null stands for everything below `_DEEPEST` levels."""
    kept: list[str] = []
    depth = start = 0
    for mark in _MARK.finditer(text):
        if mark[0] in "[{":
            depth += 1
            if depth == _DEEPEST:
                kept += [text[start : mark.start()], "null"]
        elif mark[0] in "]}":
            if depth == _DEEPEST:
                start = mark.end()
            depth -= 1
    return "".join([*kept, text[start:]])
