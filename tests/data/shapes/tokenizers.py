"""Tokenizers that people bring, and the bytes that come back."""

from pathlib import Path

from tests.data.shapes.shape import Shape
from tests.data.shapes.writing import TEXTS, jsonl
from titan_loop.text.tokenizer import load_tokenizer

_TOKENIZERS = "Tokenizers"


def _bytes_alone(folder: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    load_tokenizer(folder / "tokenizer.json")
    return folder / "tokenizer.json"


ROWS = (
    Shape(
        section=_TOKENIZERS,
        found="the 256 bytes without merges",
        taken="every text comes back",
        make=lambda folder: (folder / "a.jsonl").write_bytes(jsonl(TEXTS)),
        tokenizer=_bytes_alone,
        train=TEXTS,
    ),
)
