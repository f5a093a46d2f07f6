"""Make a `tokenizer.json`: train a byte-level BPE, or convert a tiktoken rank file."""

import base64
import binascii
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from titan_loop.data.prepare.documents import Format, Inputs, find_documents
from titan_loop.data.prepare.training_texts import training_texts
from titan_loop.errors import UserError
from titan_loop.storage.local_path import require_local
from titan_loop.text.tokenizer import (
    BYTE_VALUES,
    SPECIAL_TOKENS,
    TOKENIZER_NAME,
    byte_symbols,
    load_tokenizer,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

_PROBE = (
    "Éa été: naïve  code\n\tdef f(x):\n        return x**2 + 31415 # 漢字 🙂\r\n\n  I'll DON'T\n"
)


def train_tokenizer(
    inputs: Inputs,
    *,
    vocab_size: int,
    output: str | Path,
    format: Format = "auto",
    pattern: tuple[str, ...] = (),
    text_key: str = "text",
    max_malformed: float = 0.01,
) -> Path:
    """Train a byte-level BPE on documents and write its tokenizer.json.

    Digits are split individually; merges never cross the words of GPT-2's pattern. Words of more
    than 4,096 characters are cut for the training. The result is the same for the same documents.

    Args:
        inputs: Files as `data tokenize` reads them, or folders of these. A folder's held-out files
            are not read.
        vocab_size: Number of tokens, special ones and the 256 bytes included.
        output: Path of the new tokenizer.json, or an existing folder for it.
        format: Format of the files; auto reads it from their names.
        pattern: Patterns of file names in folders, e.g. '*.py' '*.md'.
        text_key: Field that holds a document's text.
        max_malformed: Largest share of records that may be malformed or lack their text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    smallest = BYTE_VALUES + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise UserError(
            f"vocab_size {vocab_size} is below {smallest}, 256 bytes and the special tokens"
        )
    if not 0 <= max_malformed <= 1:
        raise UserError(f"max_malformed {max_malformed} must lie in [0, 1]")
    documents = replace(find_documents(inputs, format=format, pattern=pattern), held_out_files=())
    output = _output_file(output)
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.pre_tokenizer = words  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = training_texts(documents, words, text_key=text_key, max_malformed=max_malformed)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise UserError(
            f"vocab_size {vocab_size} cannot be filled from this text, only "
            f"{tokenizer.get_vocab_size()} tokens were found: lower it or add text"
        )
    return _save(tokenizer, output)


def import_tokenizer(
    input: str | Path, *, output: str | Path, split_pattern: str | None = None
) -> Path:
    """Convert a tiktoken rank file to a tokenizer.json.

    Special tokens, `<|endoftext|>` and ChatML's two, come after the last rank.

    Args:
        input: tiktoken rank file (lines of base64 bytes and rank), or a tokenizer.json to copy.
        output: Path of the new tokenizer.json, or an existing folder for it.
        split_pattern: Pre-tokenisation pattern of the rank file, from its publisher.
    """
    require_local(input, "tokenizer")
    path, output = Path(input), _output_file(output)
    if not path.is_file():
        raise UserError(
            f"tokenizer {path} is not a file: give a tokenizer.json or a tiktoken rank file"
        )
    if path.read_bytes()[:1] == b"{":
        if split_pattern is not None:
            raise UserError("split_pattern has no effect on a tokenizer.json: drop it")
        return _save(load_tokenizer(path), output)
    ranks = _read_ranks(path)
    if split_pattern is None:
        raise UserError(
            f"tokenizer {path} is a tiktoken rank file, which does not hold its split pattern: "
            "give split_pattern as its publisher states it"
        )
    return _save(_from_ranks(ranks, split_pattern), output)


def _output_file(output: str | Path) -> Path:
    require_local(output, "output")
    output = Path(output)
    output = output / TOKENIZER_NAME if output.is_dir() else output
    with _writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    return output


def _save(tokenizer: "Tokenizer", output: Path) -> Path:
    with _writing(output):
        output.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    return output


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"output {output} cannot be written ({error.strerror})") from error


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise UserError(
            f"tokenizer {path} is neither a tokenizer.json nor a tiktoken rank file ({error})"
        ) from error
    missing = [value for value in range(BYTE_VALUES) if bytes([value]) not in ranks]
    if missing or sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(f"tokenizer {path}: ranks must be 0..n-1 and hold all 256 bytes")
    return ranks


def _from_ranks(ranks: Mapping[bytes, int], split_pattern: str) -> "Tokenizer":
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    # tiktoken merges the adjacent pair whose *concatenation* has the lowest rank. As a merge list:
    # every way to split each token in two known tokens, ordered by the token's rank.
    symbol = byte_symbols()
    merges: list[tuple[str, str]] = []
    names = {token: "".join(symbol[value] for value in token) for token in ranks}
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        merges += [(names[a], names[b]) for a, b in halves if a in ranks and b in ranks]
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(split_pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS]
    )
    _require_agreement(tokenizer, ranks, split_pattern)
    return tokenizer


def _require_agreement(
    tokenizer: "Tokenizer", ranks: Mapping[bytes, int], split_pattern: str
) -> None:
    import tiktoken

    # The two regular expression engines differ in corner cases.
    original = tiktoken.Encoding(
        "imported", pat_str=split_pattern, mergeable_ranks=dict(ranks), special_tokens={}
    )
    if tokenizer.encode(_PROBE).ids != original.encode_ordinary(_PROBE):
        raise UserError(
            "the tiktoken rank file cannot be converted exactly with this split_pattern: "
            "convert it with its publisher's tool and give the tokenizer.json"
        )
