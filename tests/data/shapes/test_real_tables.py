"""Parquet that fastparquet writes; `tools/test_tokenizers.sh` fetches it.

Its packages carry no files of its tests. A file of pyarrow's tests is a row of `records.py`.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.data.shapes.shape import TEXTS
from titan_loop.data.inspect_source import show_source
from titan_loop.data.prepare.tokenize_source import tokenize_source
from titan_loop.errors import UserError

pytestmark = pytest.mark.tokenizers

TABLE = pd.DataFrame({"text": pd.Series(TEXTS, dtype=object), "id": [1, 2, 3]})
BY_LANGUAGE = TABLE.assign(language=["en", "py", "en"])
BY_SPLIT = TABLE.assign(split=["train", "train", "test"])
OBJECTS = TABLE.assign(text=[{"body": text} for text in TEXTS])
CODECS = ("UNCOMPRESSED", "SNAPPY", "GZIP", "ZSTD", "LZ4", "LZ4_RAW", "BROTLI")
WRITTEN: dict[str, tuple[pd.DataFrame, dict[str, Any], str | tuple[str, ...]]] = {
    **{codec: (TABLE, {"compression": codec}, TEXTS) for codec in CODECS},
    "dictionary": (TABLE.assign(text=TABLE.text.astype("category")), {}, TEXTS),
    "bytes": (TABLE.assign(text=[t.encode() for t in TEXTS]), {"object_encoding": "bytes"}, TEXTS),
    "row groups": (TABLE, {"row_group_offsets": [0, 1, 2]}, TEXTS),
    "index": (TABLE.set_index("text"), {"write_index": True}, TEXTS),
    "hive": (BY_LANGUAGE, {"file_scheme": "hive", "partition_on": ["language"]}, TEXTS),
    "drill": (BY_LANGUAGE, {"file_scheme": "drill", "partition_on": ["language"]}, TEXTS),
    "splits": (BY_SPLIT, {"file_scheme": "hive", "partition_on": ["split"]}, TEXTS[:2]),
    "JSON": (TABLE, {"object_encoding": "json"}, TEXTS),
    "objects": (OBJECTS, {"object_encoding": "json"}, "'text' is not a string"),
    "renamed": (TABLE.rename(columns={"text": "body"}), {}, "no field 'text', only 'body', 'id'"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_fastparquet_writes(name, small_tokenizer, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(os.environ.get("TITAN_LOOP_TOKENIZERS", ""), "fastparquet"))
    reason = "fastparquet is not here; run tools/test_tokenizers.sh"
    fastparquet: Any = pytest.importorskip("fastparquet", reason=reason)
    table, options, expected = WRITTEN[name]
    path = tmp_path / "table.parquet"
    fastparquet.write(str(path), table, **options)
    source = {"output": tmp_path / "out", "tokenizer": small_tokenizer, "held_out_fraction": 0}
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            tokenize_source(path, **source)
        return
    card = tokenize_source(path, **source)
    assert card.dropped == {}
    found = [shown.text for shown in show_source(tmp_path / "out", count=99)]
    assert Counter(found) == Counter(f"{text}<|endoftext|>" for text in expected)
