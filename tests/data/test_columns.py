"""Declarations of columns."""

import pytest

from titan_loop.data.columns import Column, columns_for

WORD = Column(name="word", reader="loss", dtype="float32", shape=(3, 2), per_token=False)
DEPTH, BOTH = Column(name="depth", reader="model"), Column(name="both", reader="both")


def test_a_value_belongs_to_a_token_or_to_a_window():
    assert DEPTH.batch_shape(4, 16) == (4, 16)
    assert WORD.batch_shape(4, 16) == (4, 3, 2)
    assert Column(name="x", reader="model", shape=(5,)).batch_shape(4, 16) == (4, 16, 5)


def test_a_declaration_is_json():
    assert WORD.description() == {
        "name": "word", "reader": "loss", "dtype": "float32", "shape": [3, 2], "per_token": False,
    }  # fmt: skip
    assert DEPTH.description() == {
        "name": "depth", "reader": "model", "dtype": "int64", "shape": [], "per_token": True,
    }  # fmt: skip


def test_readers_get_their_columns():
    batch = {"input": 0, "word": 1, "depth": 2, "both": 3}
    assert columns_for("model", (WORD, DEPTH, BOTH), batch) == {"depth": 2, "both": 3}
    assert columns_for("loss", (WORD, DEPTH, BOTH), batch) == {"word": 1, "both": 3}


@pytest.mark.parametrize("name", ["input", "positions", "labels", "labelled"])
def test_names_of_every_batch_are_taken(name):
    with pytest.raises(AssertionError, match=f"{name} is a column of every batch"):
        Column(name=name, reader="model")
    with pytest.raises(AttributeError):  # frozen
        DEPTH.name = name  # pyright: ignore
