"""Make a `tokenizer.json`: train a byte-level BPE, or convert a tiktoken rank file."""

import base64
import binascii
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from titan_loop.data.prepare.documents import Documents, Format, find_documents
from titan_loop.data.prepare.pipeline_steps import (
    DROPPED_BY_READERS,
    document_reader,
    dropped_examples,
)
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
    inputs: str | Path | Sequence[str | Path],
    *,
    vocab_size: int,
    output: str | Path,
    text_key: str = "text",
    format: Format = "auto",
    patterns: Sequence[str] = (),
) -> Path:
    """Train a byte-level BPE on documents and write it as `tokenizer.json`.

    Digits are split individually; merges never cross the words of GPT-2's pattern. The result is
    the same for the same documents.

    Args:
        inputs: JSONL, Parquet or text files, or folders of one of these. From a folder with
            `train.jsonl` and `held_out.jsonl` only the first is read.
        vocab_size: Tokens in all, special tokens and the 256 bytes included.
        output: The file to write, or an existing folder for `tokenizer.json`.

    Returns:
        The path of the written file.

    Raises:
        UserError: For a missing or unreadable input, a record without text, a vocabulary too small
            for bytes and special tokens, text too small to fill it, or an output that cannot be
            written.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    smallest = BYTE_VALUES + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise UserError(
            f"vocab_size {vocab_size} is below {smallest}, 256 bytes and the special tokens"
        )
    documents = replace(find_documents(inputs, format=format, patterns=patterns), held_out_files=())
    output = _output_file(output)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(documents, text_key), trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise UserError(
            f"vocab_size {vocab_size} cannot be filled from this text, only "
            f"{tokenizer.get_vocab_size()} tokens were found: lower it or add text"
        )
    return _save(tokenizer, output)


def import_tokenizer(
    path: str | Path,
    *,
    output: str | Path,
    split_pattern: str | None = None,
    special_tokens: Mapping[str, int] | None = None,
) -> Path:
    """Copy a `tokenizer.json`, or convert a tiktoken rank file, to `output`.

    Args:
        path: A `tokenizer.json`, or a rank file (lines of base64 bytes and rank).
        output: The file to write, or an existing folder for `tokenizer.json`.
        split_pattern: A rank file's pre-tokenisation pattern, which the file does not hold.
            Required for rank files.
        special_tokens: A rank file's special tokens and ids; default `<|endoftext|>` and the two
            ChatML tokens after the last rank.

    Raises:
        UserError: If the file is missing or neither kind; if the pattern is missing; if the output
            cannot be written; or if the converted tokenizer does not agree with tiktoken on a probe
            text.
    """
    require_local(path, "tokenizer")
    path, output = Path(path), _output_file(output)
    if not path.is_file():
        raise UserError(
            f"tokenizer {path} is not a file: give a tokenizer.json or a tiktoken rank file"
        )
    if path.read_bytes()[:1] == b"{":
        if split_pattern is not None or special_tokens is not None:
            raise UserError(
                "split_pattern and special_tokens have no effect on a tokenizer.json: drop them"
            )
        return _save(load_tokenizer(path), output)
    ranks = _read_ranks(path)
    if split_pattern is None:
        raise UserError(
            f"tokenizer {path} is a tiktoken rank file, which does not hold its split pattern: "
            "give split_pattern as its publisher states it"
        )
    specials = dict(special_tokens or _default_specials(len(ranks)))
    return _save(_from_ranks(ranks, split_pattern, specials), output)


def _texts(documents: Documents, text_key: str) -> Iterator[str]:
    with TemporaryDirectory() as folder:
        reader = document_reader(
            documents,
            paths_file=Path(folder) / "inputs.txt",
            text_key=text_key,
            chat=False,
            examples=Path(folder),
        )
        for document in reader.run():
            yield document.text
        counts = {kind: int(reader.stats[kind].total) for kind in DROPPED_BY_READERS}
        if counts["malformed"] or counts["missing_text"]:
            first = dropped_examples(Path(folder))[0]
            raise UserError(
                f"tokenizer inputs: {counts['malformed']} records are malformed and "
                f"{counts['missing_text']} lack their text, the first that could not be used is "
                f"{first}; correct or remove them"
            )
        if counts["empty"]:
            logger.warning("tokenizer inputs: %d documents without text", counts["empty"])


def _output_file(output: str | Path) -> Path:
    """Return the file to write, in a folder that exists; before any work is done for it."""
    require_local(output, "output")
    output = Path(output)
    if output.is_dir():
        output = output / TOKENIZER_NAME
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output {output} cannot be written ({error.strerror})") from error
    return output


def _save(tokenizer: "Tokenizer", output: Path) -> Path:
    try:
        output.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    except OSError as error:
        raise UserError(f"output {output} cannot be written ({error.strerror})") from error
    return output


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


def _default_specials(first_id: int) -> dict[str, int]:
    return {token: first_id + index for index, token in enumerate(SPECIAL_TOKENS)}


def _from_ranks(
    ranks: Mapping[bytes, int], split_pattern: str, special_tokens: Mapping[str, int]
) -> "Tokenizer":
    """Express tiktoken's rule as BPE merges.

    tiktoken merges the adjacent pair whose *concatenation* has the lowest rank. That is a merge
    list with every way to split each token in two known tokens, ordered by the token's rank.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    symbol = byte_symbols()
    merges: list[tuple[str, str]] = []
    names = {token: "".join(symbol[value] for value in token) for token in ranks}
    for token in sorted(ranks, key=lambda token: ranks[token]):
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
    by_id = {token_id: token for token, token_id in special_tokens.items()}
    if min(by_id, default=len(ranks)) < len(ranks) or len(by_id) < len(special_tokens):
        raise UserError(
            f"special_tokens need distinct ids of {len(ranks)} or more: {special_tokens}"
        )
    for token_id in range(len(ranks), max(by_id, default=-1) + 1):  # ids must have no gaps
        name = by_id.get(token_id, f"<|unused_{token_id}|>")
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False)])
    _require_agreement(tokenizer, ranks, split_pattern)
    return tokenizer


def _require_agreement(
    tokenizer: "Tokenizer", ranks: Mapping[bytes, int], split_pattern: str
) -> None:
    """The two regular expression engines differ in corners, so compare instead of assuming."""
    import tiktoken

    original = tiktoken.Encoding(
        "imported", pat_str=split_pattern, mergeable_ranks=dict(ranks), special_tokens={}
    )
    if tokenizer.encode(_PROBE).ids != original.encode_ordinary(_PROBE):
        raise UserError(
            "the tiktoken rank file cannot be converted exactly with this split_pattern: "
            "convert it with its publisher's tool and give the tokenizer.json"
        )
