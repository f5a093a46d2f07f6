"""The counts of dropped documents."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from titan_loop.data.prepare.finish import _dropped
from titan_loop.data.prepare.pipelines import READ, TOKENIZE


def test_reasons_of_the_same_name_add_up(tmp_path):
    preparation: Any = SimpleNamespace(
        logs=lambda name: tmp_path, max_malformed=0.5, output=tmp_path
    )
    counted = {
        READ: Counter(records=10, empty=2, malformed=1),
        "gopher repetition": Counter(dropped=3, dropped_empty=1, dropped_top_2_gram=2),
        "language": Counter(dropped=1),
        TOKENIZE: Counter(dropped=4),
    }
    expected = {"empty": 3, "malformed": 1, "top_2_gram": 2, "language": 1}
    assert _dropped(preparation, counted) == expected


def test_nothing_dropped_is_an_empty_record(tmp_path):
    preparation: Any = SimpleNamespace(logs=lambda name: tmp_path)
    assert _dropped(preparation, {READ: Counter(records=10), TOKENIZE: Counter()}) == {}
