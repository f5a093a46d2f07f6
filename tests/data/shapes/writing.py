"""Texts and records that many rows share."""

import json
from collections.abc import Sequence
from typing import Any

TEXTS = ("first: naïve 漢字 🙂\n", "def second(x):\n    return x + 12\n", "the third document")


def json_lines(records: Sequence[Any]) -> bytes:
    """Return records as JSON lines, as Python writes them."""
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def jsonl(texts: Sequence[str]) -> bytes:
    """Return texts as JSON lines with the field `text`."""
    return json_lines([{"text": text} for text in texts])
