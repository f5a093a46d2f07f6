"""Sequences of twelve words that stand in training and in held-out text are counted."""

from titan_loop.data.demo.overlap import overlaps


def words(first: int, count: int) -> str:
    return " ".join(f"w{number}" for number in range(first, first + count))


def test_a_copy_is_a_near_duplicate_and_shorter_passages_are_a_share():
    train = [words(0, 100), words(1_000, 40)]
    copy = words(10, 50)  # 39 sequences, all trained
    partly = words(1_020, 40)  # 29 sequences, of which the first 9 are trained
    half = words(1_016, 36)  # 25 sequences, of which 13 are trained
    fresh = words(2_000, 30)
    found = overlaps(train, {"copies": [copy, half], "others": [partly, fresh, "too short"]})
    assert found["copies"] == {
        "shared_12_words": (39 + 13) / (39 + 25),
        "near_duplicates": 2,
        "near_duplicate_bytes": 1.0,
    }
    assert found["others"] == {
        "shared_12_words": 9 / (29 + 19),
        "near_duplicates": 0,
        "near_duplicate_bytes": 0.0,
    }
