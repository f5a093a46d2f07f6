"""The bytes behind every token of a document or a chat."""

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from tests.data.shapes.tokenizers import byte_level, sentencepiece
from titan_loop.data.inspect_source import verify_source
from titan_loop.data.load.held_out_windows import held_out_windows, why_not_scored
from titan_loop.data.prepare.tokenize_source import tokenize_source
from titan_loop.data.shards import TokenShards
from titan_loop.errors import UserError
from titan_loop.storage.json_files import json_sha256
from titan_loop.text.encoding import DocumentEncoder

MADE = {
    "bytes": byte_level,
    "NFKC": lambda: byte_level(normalizer=normalizers.NFKC()),
    "SentencePiece": sentencepiece,
}


def saved(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("kind", MADE)
def test_the_bytes_of_tokens_sum_to_the_text(kind, tmp_path):
    encoder = DocumentEncoder(saved(MADE[kind](), tmp_path))

    @settings(max_examples=100)
    @given(
        st.text(st.characters(codec="utf-8") | st.sampled_from("e\u0301ﬁ가\u11a8 ▁"), min_size=1)
    )
    def check(text: str) -> None:
        (ids,) = encoder.ids([text])
        assert ids.tolist() == encoder.tokenizer.encode(text, add_special_tokens=False).ids
        for n_bytes in (encoder.bytes_of(text, ids), encoder.bytes_by_offset(text)):
            assert len(n_bytes) == len(ids)
            assert not len(ids) or n_bytes.sum() == len(text.encode())

    check()


@pytest.mark.parametrize("kind", MADE)
def test_the_targets_of_chats_have_the_bytes_of_the_answers(kind, tmp_path):
    made = MADE[kind]()
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
    assert card.round_trip["changed"] == (4 if kind == "NFKC" else 0)
    shards = TokenShards(tmp_path / "out", "held_out")
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
        tokenizer=saved(MADE[kind](), tmp_path),
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
