"""Tokenizers: loading a `tokenizer.json`, special tokens, and the bytes that tokens stand for."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_loop.errors import UserError, nearest
from titan_loop.storage.file_names import require_local
from titan_loop.storage.json_files import read_small

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

TOKENIZER_NAME = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
"""The token that ends a document, unless a preparation or an imported model says otherwise."""
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
"""ChatML's tokens around a turn of a conversation."""
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
"""Ids 0, 1 and 2 of a tokenizer trained here."""

BYTE_VALUES = 256
_LARGEST_UINT16_VOCABULARY = 1 << 16
_MOST_IDS = 1 << 24


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """Load a `tokenizer.json`, without the truncation and padding it may ask for."""
    from tokenizers import Tokenizer

    require_local(path, "tokenizer")
    path = Path(path)
    if not path.is_file():
        raise UserError(f"tokenizer {path} is not a file: train one or give a tokenizer.json")
    content = read_small(path, fix="train one or give a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_buffer(content)
        ids = vocab_size(tokenizer)
    except BaseException as error:  # the Rust side raises bare Exception, and panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"tokenizer {path} is not a tokenizer.json ({error}); transformers' AutoTokenizer "
            "saves one of most others"
        ) from error
    if ids > _MOST_IDS:
        raise UserError(f"tokenizer {path} has the id {ids - 1}; the limit is {_MOST_IDS - 1}")
    tokenizer.no_truncation()  # some publishers leave both on
    tokenizer.no_padding()
    return tokenizer


def same_ids(first: Path, second: Path) -> bool:
    """Return whether two `tokenizer.json` files, if both exist, turn every text into the same ids.

    Programs that save a tokenizer again, such as transformers 5, keep the parts that decide the
    ids, and write other decoders and post-processors. Only whole texts are encoded here, with BOS
    added apart, so those count for nothing.
    """
    if not (first.is_file() and second.is_file()):
        return False
    return _deciding_parts(first) == _deciding_parts(second)


def _deciding_parts(path: Path) -> dict[str, Any]:
    record = json.loads(load_tokenizer(path).to_str())
    splitter: dict[str, Any] = record["pre_tokenizer"] or {}
    for part in (splitter, *splitter.get("pretokenizers", ())):
        part.pop("trim_offsets", None)  # places of characters alone
    return {name: record[name] for name in ("model", "normalizer", "added_tokens")} | {
        "pre_tokenizer": splitter
    }


def vocab_size(tokenizer: "Tokenizer") -> int:
    """Return the largest token id + 1; larger than the number of tokens if ids have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def token_bytes(tokenizer: "Tokenizer") -> int:
    """Return the bytes of a stored token id: 4 above 65,536 tokens, else 2, as in datatrove."""
    if tokenizer.get_vocab_size() > _LARGEST_UINT16_VOCABULARY:
        return 4
    if vocab_size(tokenizer) > _LARGEST_UINT16_VOCABULARY:
        raise UserError(
            f"the tokenizer has an id of {vocab_size(tokenizer) - 1} among "
            f"{tokenizer.get_vocab_size()} tokens, which two bytes cannot hold: renumber its tokens"
        )
    return 2


def check_vocabulary(
    tokenizer: "Tokenizer", rows: int, name: str, *, most_spare_rows: int | None = None
) -> None:
    """Raise `UserError` unless a tokenizer's ids are rows of a model's embedding.

    At most `most_spare_rows` may have no token, as padding to a round number; None allows any
    number. `name` is the tokenizer's in messages.
    """
    ids = vocab_size(tokenizer)
    if ids > rows or (most_spare_rows is not None and ids < rows - most_spare_rows):
        raise UserError(
            f"tokenizer {name} has {ids} token ids, the model's vocabulary has {rows}; use the "
            "tokenizer the model was trained with"
        )


def require_token(tokenizer: "Tokenizer", token: str, field: str) -> int:
    """Return a token's id; raise `UserError` about `field` if the tokenizer lacks it."""
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        known = [added.content for added in tokenizer.get_added_tokens_decoder().values()]
        raise UserError(f"{field} {token!r} is not in the tokenizer{nearest(token, known)}")
    return token_id


def template_prefix(tokenizer: "Tokenizer") -> list[int]:
    """Return the ids that the tokenizer's template puts in front of every text."""

    def is_known(text: str) -> bool:
        try:
            return bool(tokenizer.encode(text, add_special_tokens=False).ids)
        except Exception:  # words alone, without a token for unknown ones
            return False

    text = "a"
    if not is_known(text):  # a tokenizer of proteins, say
        text = next(filter(is_known, tokenizer.get_vocab()), "")
    whole = tokenizer.encode(text, add_special_tokens=True)
    texts = [place for place, is_added in enumerate(whole.special_tokens_mask) if not is_added]
    return whole.ids[: texts[0]] if texts else []


def template_bos(tokenizer: "Tokenizer", name: str, fix: str) -> int | None:
    """Return the id that the tokenizer's template puts in front of every text; None for none.

    Raises `UserError`, with the tokenizer's name and a fix, if it puts several ids there.
    """
    before = template_prefix(tokenizer)
    if len(before) > 1:
        tokens = [tokenizer.id_to_token(token) for token in before]
        raise UserError(
            f"tokenizer {name} puts {len(before)} tokens in front of every text ({tokens}), where "
            f"a language model has one or none: {fix}"
        )
    return before[0] if before else None


def encode_prompt(tokenizer: "Tokenizer", text: str, begin: int | None) -> list[int]:
    """Return the ids of a text at the beginning of a document; it may spell out special tokens.

    `begin` is the token in front of every document, which is not added to a text that spells it.
    """
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return ids if begin is None or ids[:1] == [begin] else [begin, *ids]


def bytes_of_token(tokenizer: "Tokenizer", token: int) -> bytes:
    """Return the bytes that a token stands for inside a text, some of which may be no character."""
    from tokenizers import pre_tokenizers

    name = tokenizer.id_to_token(token) or ""
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", name):  # SentencePiece's
        return bytes([int(byte[1], 16)])
    # Alone, SentencePiece's decoder would drop a token's first space.
    once, twice = (tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if "\ufffd" not in once or not {*alphabet}.issuperset(name):
        return twice[len(once) :].encode()
    own = sorted(code for code in map(ord, alphabet) if code < BYTE_VALUES)
    others = sorted({*range(BYTE_VALUES)}.difference(own))  # in order, as characters from 256 on
    numbers = {chr(code): code for code in own} | {
        chr(BYTE_VALUES + place): code for place, code in enumerate(others)
    }
    return bytes(numbers[character] for character in name)


def token_byte_lengths(tokenizer: "Tokenizer") -> "np.ndarray | None":
    """Return the bytes of text behind each token id: int64, shape (largest id + 1,).

    Special tokens and ids without a token have 0. None for a tokenizer that is not byte-level.
    """
    import numpy as np
    from tokenizers import pre_tokenizers

    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    lengths = np.zeros(vocab_size(tokenizer), dtype=np.int64)
    for token, token_id in vocabulary.items():
        if token_id in added:
            lengths[token_id] = 0 if added[token_id].special else len(token.encode())
        elif alphabet.issuperset(token):
            lengths[token_id] = len(token)  # one character of this alphabet per byte
        else:
            return None
    return lengths
