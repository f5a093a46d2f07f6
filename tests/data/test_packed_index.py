"""The documents of packed windows, and damaged indices."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from titan_loop.data.packed_index import PIECE, WINDOW_END, PackedIndex
from titan_loop.errors import UserError

SEQ_LEN, TOKENS = 7, 100
PIECES = [(0, 5), (90, 3), (5, 8), (92, 8)]
"""Windows of 8 tokens: two pieces fill the first one, the others are whole pieces."""
ENDS = [2, 3, 4]


class Files:
    """Reads as `OpenFiles`, and counts the values."""

    def read(self, path: str, dtype: np.dtype, first: int, count: int) -> np.ndarray:
        values = np.fromfile(path, dtype=dtype)[first : first + count]
        assert len(values) == count
        return values


def index(
    folder: Path, pieces: list[tuple[int, int]] = PIECES, ends: list[int] = ENDS, fill: int = 24
) -> PackedIndex:
    split = folder / "train"
    split.mkdir(exist_ok=True)
    np.array(pieces, dtype=PIECE).tofile(split / f"packed_{SEQ_LEN}.pieces")
    np.array(ends, dtype=WINDOW_END).tofile(split / f"packed_{SEQ_LEN}.windows")
    return PackedIndex(shards(folder, tokens=fill), SEQ_LEN)


def shards(folder: Path, tokens: int = 24) -> Any:
    card = SimpleNamespace(windows=3, pieces=4, tokens=tokens, seq_len=SEQ_LEN, split_documents=0)
    packed = {SEQ_LEN: card}
    split = SimpleNamespace(packed=[card], packed_for=packed.get)
    return SimpleNamespace(folder=folder, name="train", split=split, files=Files(), tokens=TOKENS)


def test_windows_have_their_pieces(tmp_path: Path):
    found = index(tmp_path)
    assert [found.documents(window) for window in range(3)] == [PIECES[:2], PIECES[2:3], PIECES[3:]]
    assert found.fill == 1
    assert index(tmp_path, fill=18).fill == 0.75
    for window in (-1, 3):
        with pytest.raises(IndexError):
            found.documents(window)


@pytest.mark.parametrize(
    ("pieces", "ends", "window"),
    [
        (PIECES, [0, 3, 4], 0),  # no piece
        (PIECES, [2, 2, 4], 1),
        (PIECES, [3, 2, 4], 1),  # ends before it begins
        (PIECES, [2, 3, 5], 2),  # beyond the pieces
        ([(0, 5), (90, 4), *PIECES[2:]], ENDS, 0),  # nine tokens
        ([(0, 5), (90, 0), *PIECES[2:]], ENDS, 0),  # an empty piece
        ([*PIECES[:3], (93, 8)], ENDS, 2),  # beyond the tokens
        ([*PIECES[:3], (2**64 - 1, 8)], ENDS, 2),
    ],
)
def test_a_damaged_window_is_one_line_and_the_others_are_read(tmp_path, pieces, ends, window):
    with pytest.raises(UserError, match=f"window {window} is damaged; pack the source again"):
        index(tmp_path, pieces, ends).documents(window)


def test_a_source_that_is_not_packed_so(tmp_path: Path):
    with pytest.raises(UserError, match=rf"windows of 9 in 'train' \(packed for: \[{SEQ_LEN}\]\)"):
        PackedIndex(shards(tmp_path), 9)


@pytest.mark.parametrize(
    ("name", "expected"), [("windows", 3 * 8), ("pieces", 4 * 12)], ids=["windows", "pieces"]
)
@pytest.mark.parametrize("missing", [False, True])
def test_a_file_of_another_size(tmp_path: Path, name: str, expected: int, missing: bool):
    index(tmp_path)
    path = tmp_path / "train" / f"packed_{SEQ_LEN}.{name}"
    if missing:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + b"x")
    has = "no" if missing else str(expected + 1)
    with pytest.raises(UserError, match=f"has {has} bytes, its card says {expected}: pack the"):
        PackedIndex(shards(tmp_path), SEQ_LEN)
