"""Tokenizers that people bring, and what comes back from their tokens."""

import json
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.data.shapes.shape import TEXTS, Rows, Shape, jsonl

_END = "<|endoftext|>"
_KOREAN = tuple(unicodedata.normalize("NFD", text) for text in ("안녕하세요 세계", "대한민국 서울"))
_MIXED = ("Größe Ｆｕｌｌ ① x = 1", "if Ready:\n\treturn  2")


def byte_level(**parts: Any) -> Tokenizer:
    """Return the 256 bytes without merges, in GPT-2's alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return _with(tokenizer, **parts)


def _with(tokenizer: Tokenizer, *, added: tuple[Any, ...] = (), **parts: Any) -> Tokenizer:
    tokenizer.add_special_tokens([_END, "<s>"])
    tokenizer.add_tokens([*added])
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def _template(single: str) -> Any:
    tokens = [(token, 257 if token == "<s>" else 256) for token in (_END, "<s>")]
    return processors.TemplateProcessing(single=single, special_tokens=tokens)


def _trained(model: Any, trainer: Any, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator([*TEXTS, *_MIXED[:1]], trainer)
    return _with(tokenizer)


def sentencepiece(**options: Any) -> Tokenizer:
    """Return Llama 2's kind of tokenizer: bytes stand for characters that are not in it."""
    vocabulary = {"<unk>": 0, **{f"<0x{value:02X}>": 1 + value for value in range(256)}}
    for symbol in "▁abcdefghijklmnopqrstuvwxyz":
        vocabulary[symbol] = len(vocabulary)
    vocabulary["▁t"] = len(vocabulary)
    model = models.BPE(
        vocab=vocabulary, merges=[("▁", "t")], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    back = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    return _with(
        Tokenizer(model),
        normalizer=normalizers.Sequence(steps),
        decoder=decoders.Sequence(back),
        **options,
    )


def _row(
    tokenizer: Callable[[], Tokenizer | str], texts: tuple[str, ...] = TEXTS, **row: Any
) -> Shape:
    def save(folder: Path) -> Path:
        made = tokenizer()
        text = made if isinstance(made, str) else made.to_str()
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        return folder / "tokenizer.json"

    return Shape({"a.jsonl": jsonl(texts)}, tokenizer=save, train=texts, **row)


_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
_LOSES_SPACES = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), _BYTE_LEVEL])
_SMALL: Mapping[str, Any] = {"vocab_size": 300, "show_progress": False}
_BACK = "do not come back"


def _without_bytes() -> Tokenizer:
    return _trained(
        models.BPE(),
        trainers.BpeTrainer(**_SMALL),
        pre_tokenizer=_BYTE_LEVEL,
        decoder=decoders.ByteLevel(),
    )


def _word_piece() -> Tokenizer:
    return _trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(special_tokens=["[UNK]"], **_SMALL),
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.Fuse(),
    )


def _cutting() -> str:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8, pad_token=_END, pad_id=256)
    return tokenizer.to_str()


def _far_id() -> str:
    record = json.loads(byte_level().to_str())
    record["model"]["vocab"]["z" * 9] = 1 << 16
    return json.dumps(record)


ROWS: Rows = {
    # Tokenizers
    "256 bytes": _row(byte_level),
    "NFC": _row(
        lambda: byte_level(normalizer=normalizers.NFC()),
        texts=_KOREAN,
        stored=tuple(unicodedata.normalize("NFC", text) for text in _KOREAN),
        warned=(f"2 of 2 documents, a sample, {_BACK} from their tokens; first /",),
    ),
    "NFKC": _row(
        lambda: byte_level(normalizer=normalizers.NFKC()),
        texts=_MIXED,
        stored=("Größe Full 1 x = 1", _MIXED[1]),
        warned=(
            "first /",
            "/a.jsonl/1: 'Größe Ｆｕｌｌ ① x = 1' comes back as 'Größe Full 1 x = 1'",
        ),
    ),
    "prefix space": _row(
        lambda: byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        stored=tuple(f" {text}" for text in TEXTS),
        warned=("3 of 3 documents",),
    ),
    "white space": _row(
        lambda: byte_level(pre_tokenizer=_LOSES_SPACES),
        texts=_MIXED,
        stored=("GrößeＦｕｌｌ①x=1", "ifReady:return2"),
        warned=(_BACK,),
    ),
    "missing bytes": _row(
        _without_bytes,
        texts=("x = 9 ~", "the third"),
        stored=("x =  ", "the third"),
        warned=("1 of 2 documents",),
    ),
    "WordPiece": _row(
        _word_piece,
        texts=("the Third 9", "second"),
        stored=("thethird[UNK]", "second"),
        warned=(_BACK,),
    ),
    "SentencePiece": _row(sentencepiece, texts=("the 漢字 cat\n  sat", " A b")),
    "BOS": _row(
        lambda: byte_level(post_processor=_template("<s> $A")),
        stored=tuple(f"<s>{text}" for text in TEXTS),
    ),
    "no-bos": _row(
        lambda: byte_level(post_processor=_template("<s> $A")), options={"no_bos": True}
    ),
    "BOS is EOS": _row(
        lambda: byte_level(post_processor=_template(f"{_END} $A")),
        stored=tuple(f"{_END}{text}" for text in TEXTS),
    ),
    "two tokens in front": _row(
        lambda: byte_level(post_processor=_template(f"<s> {_END} $A")),
        refused="puts 2 tokens in front of every text .* give --no-bos",
    ),
    "no-bos without BOS": _row(
        byte_level, options={"no_bos": True}, refused="no_bos has no effect"
    ),
    "greedy token": _row(
        lambda: byte_level(added=(AddedToken("<tag>", lstrip=True, rstrip=True),)),
        texts=("a <tag> b", "plain"),
        stored=("a<tag>b", "plain"),
        warned=("'a <tag> b' comes back as 'a<tag>b'",),
    ),
    "truncation": _row(_cutting),
    "no EOS": _row(
        lambda: Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).to_str(),
        refused=r"eos_token '<\|endoftext\|>' is not in the tokenizer",
    ),
    "far id": _row(_far_id, refused="an id of 65536 among 259 tokens, which two bytes cannot hold"),
    "no tokenizer": _row(lambda: "\n\x0e\n\x05<unk>", refused=r"is not a tokenizer\.json"),
}
