"""The small tokenizer that the tests of the data use, too."""

from tests.data.conftest import jsonl, small_tokenizer

__all__ = ["jsonl", "small_tokenizer"]
