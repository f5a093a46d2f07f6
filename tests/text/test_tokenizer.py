"""Which vocabularies a model accepts."""

from pathlib import Path

import pytest

from titan_loop.errors import UserError
from titan_loop.text.tokenizer import check_vocabulary, load_tokenizer, vocab_size


def test_spare_rows_of_a_padded_vocabulary_are_allowed(small_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(small_tokenizer)
    rows = vocab_size(tokenizer)
    check_vocabulary(tokenizer, rows, "of the test")
    check_vocabulary(tokenizer, rows + 1000, "of the test")
    check_vocabulary(tokenizer, rows + 10, "of the test", most_spare_rows=10)
    for model_rows, spare in ((rows - 1, None), (rows + 11, 10)):
        with pytest.raises(UserError, match=f"vocabulary has {model_rows}; use the tokenizer"):
            check_vocabulary(tokenizer, model_rows, "of the test", most_spare_rows=spare)
