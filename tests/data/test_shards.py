import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from titan_loop.data.shards import TokenShards, index_path
from titan_loop.data.source_card import CARD_NAME
from titan_loop.errors import UserError
from titan_loop.storage.json_files import json_sha256

SHARDS = [[[5, 6, 0], [7, 0]], [[8, 9, 10, 0]], [[11, 0], [0]]]


@pytest.fixture
def source(write_source) -> Path:
    return write_source("three_shards", SHARDS, by_index=True)


def test_any_slice_is_the_stream_s_and_ends_read_off_tokens_are_those_of_the_index(
    write_source, documents
):
    stored = [*documents(0, 30, 12), [0], [0], *documents(1, 10, 40)]
    layout = [[], stored[:17], [], [], stored[17:18], stored[18:], []]
    by_index, by_eos = (
        TokenShards(write_source(f"{flag}", layout, by_index=flag)) for flag in (True, False)
    )
    stream = [token for document in stored for token in document]
    ends = np.cumsum([*map(len, stored)]).tolist()
    for start in range(by_eos.tokens):
        for count in {1, 2, 45, by_eos.tokens - start}:
            if start + count <= by_eos.tokens:
                both = by_index.read(start, count), by_eos.read(start, count)
                assert both[0][0].tolist() == stream[start : start + count]
                inside = [end - start for end in ends if start < end <= start + count]
                assert both[0][1].tolist() == inside
                for indexed, scanned in zip(*both, strict=True):
                    assert indexed.dtype == scanned.dtype
                    assert indexed.tolist() == scanned.tolist()
    assert {Path(path).suffix for path in by_index.files._descriptors} == {".ds", ".index"}
    assert {Path(path).suffix for path in by_eos.files._descriptors} == {".ds"}
    assert [by_eos.document(n).tolist() for n in range(len(stored))] == stored
    inner = TokenShards(write_source("s", [[[5, 0, 6, 0], [7, 8]]]))
    assert inner.read(0, 6)[1].tolist() == [4, 6]  # an EOS inside a document is no end


def test_an_edited_card_is_refused(source):
    path = source / CARD_NAME
    sound = path.read_text()
    for old, new in (('"eos_id": 0', '"eos_id": 1'), ('"licence": "test"', '"licence": ""')):
        assert sound.count(old) == 1
        path.write_text(sound.replace(old, new))
        with pytest.raises(UserError, match=r"source card .* was changed after it was written"):
            TokenShards(source)
    path.write_text(json.dumps(json.loads(sound), sort_keys=True))  # another spelling of the same
    TokenShards(source)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 3}, r"^source .* has format 3, this version reads 2"),
        ({"surprise": 1}, "is unreadable"),
        ({"eos_id": -1}, "eos_id -1 is outside its vocabulary of 300"),
        ({"token_bytes": 8}, "token_bytes 8 is neither 2 nor 4"),
        ({"bos_id": 300}, "bos_id 300 is outside its vocabulary of 300"),
        ({"splits": ["train"]}, "is unreadable"),
        ({"max_token_id": "9"}, r"is unreadable \(max_token_id='9'\)"),
        ({"file": "../../../x"}, r"source.json names the file .* do not use this data"),
        ({"vocab_size": 11}, "token id 11 is outside its vocabulary of 11"),
        (b"{", r"source\.json is damaged .*; prepare it again"),
        (b"[]", r"source\.json is damaged .*; prepare it again"),
        (b'{"name": "\xff"}', r"source\.json is damaged .*; prepare it again"),
    ],
)
def test_unreadable_or_newer_card(source, changes, message):
    if not isinstance(changes, bytes):  # signed again, as an attacker would
        card = json.loads((source / CARD_NAME).read_text())
        del card["card_sha256"]
        split = card["splits"]["train"]
        place = {"max_token_id": split, "file": split["shards"][0]}.get(next(iter(changes)), card)
        place.update(changes)
        changes = json.dumps({**card, "card_sha256": json_sha256(card)}).encode()
    (source / CARD_NAME).write_bytes(changes)
    with pytest.raises(UserError, match=message):
        TokenShards(source)


def test_what_is_not_there(source, tmp_path):
    for folder, split, message in (
        (tmp_path / "nowhere", "train", "nowhere is not a folder"),
        (tmp_path, "train", f"has no {CARD_NAME}"),
        (source, "held_out", "no tokens in its split 'held_out': prepare it"),
    ):
        with pytest.raises(UserError, match=message):
            TokenShards(folder, split)
    shards = TokenShards(source)
    np.asarray([5, 999, 0, 7, 0], dtype="<u2").tofile(source / "train" / "00000.ds")
    with pytest.raises(UserError, match="token id 999 near token 0 is outside the vocabulary"):
        shards.read(0, 3)
    np.asarray([3, 6], dtype="<u8").tofile(index_path(source / "train" / "00000.ds"))
    with pytest.raises(UserError, match="ends at token 6, its shard has 5"):
        TokenShards(source).read(3, 2)


@pytest.mark.parametrize("in_use", [False, True])
@pytest.mark.parametrize(
    ("name", "size", "refused", "refused_in_use"),
    [
        ("00001.ds", 6, "has 6 bytes, its card says 8", r"ds was removed or truncated .* \(\d+ of"),
        ("00001.ds", None, r"00001\.ds is missing", r"00001\.ds was removed or truncated"),
        ("00001.ds.index", 0, "index has 0 bytes, its card says", "index was removed or truncated"),
    ],
)
def test_damaged_files(source, name, size, refused, refused_in_use, in_use):
    shards = TokenShards(source) if in_use else None
    path = source / "train" / name
    path.unlink() if size is None else os.truncate(path, size)
    with pytest.raises(UserError, match=refused_in_use if in_use else refused):
        (shards or TokenShards(source)).read(0, 12)


def one_shard(write_source: Callable[..., Path], lengths: np.ndarray) -> tuple[Path, np.ndarray]:
    shard = [[1] * (length - 1) + [0] for length in lengths.tolist()]
    return write_source("one_shard", [shard], by_index=True), np.cumsum(lengths)


@pytest.mark.parametrize("damage", ["swapped", "zeroed", "raised", "lowered"])
@pytest.mark.parametrize("number", [0, 1023])
def test_a_damaged_index_never_gives_wrong_ends(write_source, damage, number):
    folder, ends = one_shard(write_source, np.full(4000, 5))
    damaged = ends.copy()
    if damage == "swapped":
        damaged[[number, number + 1]] = ends[[number + 1, number]]
    else:
        damaged[number] = {"zeroed": 0, "raised": ends[number + 1], "lowered": -1}[damage]
    damaged.astype("<i8").tofile(index_path(folder / "train" / "00000.ds"))
    shards = TokenShards(folder)
    count = 5117  # the first block read ends near the end of the window
    refused = 0
    for start in range(0, shards.tokens - count, 7):
        try:
            found = shards.read(start, count)[1]
        except UserError:
            refused += 1
        else:
            expected = ends[(ends > start) & (ends <= start + count)] - start
            assert found.tolist() == expected.tolist()
    assert refused
