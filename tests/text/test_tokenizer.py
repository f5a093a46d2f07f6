"""Tokenizers as they are loaded, the sizes of their ids, and vocabularies that a model accepts."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.processors import TemplateProcessing

from titan_loop.errors import UserError
from titan_loop.text.encoding import DocumentEncoder
from titan_loop.text.tokenizer import (
    same_ids,
    template_prefix,
    token_byte_lengths,
    token_bytes,
    vocab_size,
)


def of_ids(**ids: int) -> Tokenizer:
    """Return a tokenizer whose tokens have these ids."""
    return Tokenizer(WordLevel(ids, unk_token=next(iter(ids))))


def saved(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_ids_have_two_bytes_up_to_65536_tokens():
    words = {str(number): number for number in range(2**16)}
    assert token_bytes(of_ids(**words)) == 2
    assert token_bytes(of_ids(**words, one_more=2**16)) == 4
    assert token_bytes(of_ids(a=2**16 - 1)) == 2
    with pytest.raises(UserError, match="has an id of 65536 among 1 tokens"):
        token_bytes(of_ids(a=2**16))
    assert vocab_size(Tokenizer(WordLevel({}, unk_token="a"))) == 0


def test_bytes_behind_a_token():
    tokenizer = of_ids(a=0, Ġab=1)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.add_tokens([AddedToken("é", special=False)])
    lengths = token_byte_lengths(tokenizer)
    assert lengths.tolist() == [1, 3, 0, 2]
    assert token_byte_lengths(of_ids(a=0, 漢=1)) is None


@pytest.mark.parametrize("model", [BPE({"G": 0}, []), WordLevel({"G": 0}, unk_token="none")])
def test_a_tokenizer_that_knows_few_letters(model, tmp_path):
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    template = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.post_processor = template  # type: ignore[assignment]
    assert template_prefix(tokenizer) == [1]
    encoder = DocumentEncoder(saved(tokenizer, tmp_path))
    if isinstance(model, WordLevel):
        with pytest.raises(UserError, match=r"cannot encode a text \(WordLevel error: Missing"):
            encoder.ids(["A"])


RESAVED = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"decoder": None, "post_processor": RESAVED, "truncation": None}, True),
        ({"pre_tokenizer": RESAVED}, True),
        ({"pre_tokenizer": RESAVED | {"use_regex": False}}, False),
        ({"normalizer": {"type": "NFC"}}, False),
        ({"added_tokens": []}, False),
    ],
    ids=str,
)
def test_what_decides_the_ids(tmp_path, changes, is_same):
    tokenizer = of_ids(a=0, b=1)
    tokenizer.add_tokens(["c"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    first, second = saved(tokenizer, tmp_path), tmp_path / "second.json"
    record = json.loads(first.read_text())
    second.write_text(json.dumps(record | changes))
    assert same_ids(first, second) is is_same
    assert not same_ids(first, tmp_path / "none.json")
