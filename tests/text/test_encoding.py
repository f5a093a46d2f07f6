"""Documents as ids: long ones in pieces, the bytes behind every token."""

import json
import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from tests.data.shapes.tokenizers import byte_level, sentencepiece
from titan_loop.data.inspect_source import verify_source
from titan_loop.data.load.held_out_windows import held_out_windows, why_not_scored
from titan_loop.data.prepare.tokenize_source import tokenize_source
from titan_loop.data.shards import TokenShards
from titan_loop.errors import UserError
from titan_loop.storage.json_files import json_sha256
from titan_loop.text import encoding
from titan_loop.text.encoding import DocumentEncoder

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split_by(pattern: str) -> Tokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated"), _BYTES]
    return byte_level(pre_tokenizer=pre_tokenizers.Sequence(splits))


def digits_apart() -> Tokenizer:
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    return byte_level(pre_tokenizer=pre_tokenizers.Sequence(steps))


def tag() -> Tokenizer:
    return byte_level(added=(AddedToken("foo <tag> Bar", rstrip=True),))


TOKENIZERS = {
    "GPT-2": (byte_level, True),
    "digits": (digits_apart, True),
    "GPT-4": (lambda: split_by(GPT4), True),
    "NFC": (lambda: byte_level(normalizer=normalizers.NFC()), True),
    "prefix": (lambda: byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(True)), True),
    "added": (tag, True),
    "no word": (lambda: byte_level(pre_tokenizer=_BYTES), False),
    "lookbehind": (lambda: split_by(r"(?<=a)\s+|\w+"), False),
    "anchor": (lambda: split_by(r"^\w+|\s+"), False),
    "whole lines": (lambda: split_by(r"[^\n]+\n?"), False),
    "SentencePiece": (sentencepiece, False),
}


def long_text(characters: int) -> str:
    chosen = random.Random(0)
    words = ["foo", "Bar", " ", "  ", "\n", "\n\n", "\t", "12345", "!!", "it's", "漢字", "。"]
    words += ["e\u0301", "🙂", "\r\n", "_", "foo <tag> Bar", "\u3000", "ﬁ"]
    text = ""
    while len(text) < characters:
        text += chosen.choice(words)
    return text


def saved(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_give_the_ids_of_the_whole(name, tmp_path, monkeypatch):
    make, may_cut = TOKENIZERS[name]
    encoder = DocumentEncoder(saved(make(), tmp_path))
    texts = [long_text(30_000), "x", long_text(9000), "a" * 3000, " " * 3000]
    whole = [encoder.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    monkeypatch.setattr(encoding, "_PIECE", 512)
    monkeypatch.setattr(encoding, "_TOGETHER", 2048)
    assert [ids.tolist() for ids in encoder.ids(texts)] == whole
    assert (len(encoder._pieces(texts[0])) > 10) == may_cut
    for text, ids in zip(texts, whole, strict=True):
        n_bytes = encoder.bytes_of_tokens(text)
        assert len(n_bytes) == len(ids)
        assert n_bytes.sum() == len(text.encode())


@pytest.mark.parametrize(
    "tokenizer",
    [byte_level(normalizer=normalizers.NFKC()), byte_level(), sentencepiece()],
    ids=["NFKC", "bytes", "SentencePiece"],
)
def test_the_bytes_of_tokens_sum_to_the_text(tokenizer, tmp_path):
    encoder = DocumentEncoder(saved(tokenizer, tmp_path))

    @settings(max_examples=200)
    @given(
        st.text(st.characters(codec="utf-8") | st.sampled_from("e\u0301ﬁ가\u11a8 ▁"), min_size=1)
    )
    def check(text: str) -> None:
        (ids,) = encoder.ids([text])
        n_bytes = encoder.bytes_of_tokens(text)
        assert len(n_bytes) == len(ids)
        assert not len(ids) or n_bytes.sum() == len(text.encode())

    check()


@pytest.mark.parametrize("kind", ["bytes", "NFC", "SentencePiece"])
def test_the_targets_of_chats_have_the_bytes_of_the_answers(kind, tmp_path):
    made = sentencepiece() if kind == "SentencePiece" else byte_level()
    if kind == "NFC":
        made.normalizer = normalizers.NFC()  # type: ignore[assignment]
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    answer = unicodedata.normalize("NFD", "é 가 the answer\n")
    turns = [{"role": "user", "content": "漢 x"}, {"role": "assistant", "content": answer}]
    chats = [json.dumps({"messages": turns * count}) for count in (1, 2, 3)]
    (tmp_path / "a.jsonl").write_text("\n".join(chats[:1]))
    (tmp_path / "b.jsonl").write_text("\n".join(chats))
    card = tokenize_source(
        tmp_path / "a.jsonl",
        held_out_inputs=tmp_path / "b.jsonl",
        output=tmp_path / "out",
        tokenizer=saved(made, tmp_path),
        chat=True,
    )
    assert card.round_trip["decoded"] == 4
    assert card.round_trip["changed"] == (4 if kind == "NFC" else 0)
    shards = TokenShards(tmp_path / "out", "held_out")
    assert bool(shards.split.shards[0].bytes_sha256) == (kind != "bytes")
    n_bytes, mask = shards.read_bytes(0, shards.tokens), shards.read_mask(0, shards.tokens)
    assert np.asarray(n_bytes)[mask == 1].sum() == 6 * len(answer.encode())


@pytest.mark.parametrize("kind", ["bytes", "SentencePiece"])
def test_sources_of_older_versions(kind, tmp_path):
    """Those of dfd5e2b4, whose cards know neither BOS, nor bytes of tokens, nor a sample."""
    (tmp_path / "a.txt").write_text("a cat sat ")
    (tmp_path / "b.txt").write_text("the 漢字 cat " * 9)
    source = tmp_path / "out"
    tokenize_source(
        tmp_path / "a.txt",
        held_out_inputs=tmp_path / "b.txt",
        output=source,
        tokenizer=saved(sentencepiece() if kind == "SentencePiece" else byte_level(), tmp_path),
    )
    assert why_not_scored(source, 16) == ""
    windows = held_out_windows(source, seq_len=16, count=1)
    card = json.loads((source / "source.json").read_text())
    for name in ("bos_id", "round_trip", "card_sha256"):
        del card[name]
    for split in card["splits"].values():
        for shard in split["shards"]:
            del shard["bytes_sha256"]
    card["card_sha256"] = json_sha256(card)
    (source / "source.json").write_text(json.dumps(card))
    assert list(verify_source(source)) == []
    if kind == "bytes":
        assert why_not_scored(source, 16) == ""
        again = held_out_windows(source, seq_len=16, count=1)
        assert again.label_bytes.equal(windows.label_bytes)
        return
    assert "was prepared by an older version" in why_not_scored(source, 16)
    with pytest.raises(UserError, match="is not byte-level: prepare it again"):
        held_out_windows(source, seq_len=16, count=1)
