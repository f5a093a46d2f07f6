"""Encoding of whole documents: their ids, and the bytes of text behind each id.

    text ─► pieces, cut where no id can change ─► encode_batch ─► ids, bytes of each token

The `tokenizers` library takes about 230 bytes of memory per character. A long text is cut where two
words of the pre-tokenizer meet; a text without such a place is encoded whole.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_loop.text.tokenizer import load_tokenizer, token_byte_lengths

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Encoding, Tokenizer

_PIECE = 1 << 16  # characters of a long text that are encoded at once
_TOGETHER = 1 << 18  # characters in a call of encode_batch, which encodes its texts in parallel
_OVERLAP = 256  # characters on either side of a cut that are encoded to prove it
_TRIED_CUTS = 64
_CUT = re.compile(r"(?<=\S)\s")

# Words that depend on nothing before them. Metaspace and prefix spaces are caught by the proof.
_CUTTING = {
    *("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation"),
    *("Split", "Whitespace", "WhitespaceSplit"),
}
_LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"}
# Anchors, lookbehind, \b and back references see what comes before a word; a class may hold ^, $.
_LOOKS_BACK = re.compile(r"[\^$]|\\[bBAZzGK1-9]|\(\?<")
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]|\\[\^$\\]")


class DocumentEncoder:
    """Encodes documents as plain text: a special token that is spelt out in one stays text.

    Attributes:
        table: Bytes of text behind each id, as `token_byte_lengths` returns them; None unless the
            tokenizer is byte-level. A tokenizer that changes texts gives other sums.
    """

    def __init__(self, path: "str | Path") -> None:
        self.tokenizer = load_tokenizer(path)
        self.tokenizer.encode_special_tokens = True  # despite the name: encode them as text
        self.table = token_byte_lengths(self.tokenizer)

    @cached_property
    def _may_cut(self) -> bool:
        return _may_cut(self.tokenizer)

    def ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids (uint32) of each text, without the tokens of the template."""
        pieces = [self._pieces(text) for text in texts]
        encoded = self._encoded([piece for parts in pieces for piece in parts])
        found = [[_ids(next(encoded)) for _ in parts] for parts in pieces]
        return [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in found]

    def is_exact(self, ids: np.ndarray, n_bytes: int) -> bool:
        """Return whether the table's bytes of the ids are as many as their text has."""
        return self.table is not None and int(self.table[ids].sum()) == n_bytes

    def bytes_of_tokens(self, text: str) -> np.ndarray:
        """Return the bytes of the text behind each of its ids, uint32; their sum is the text's.

        A token has the characters from its offset to the next token's, so that what a normalizer
        or a pre-tokenizer drops counts, too. Of tokens that share a character, the last one has it.
        """
        parts: list[np.ndarray] = []
        pieces = self._pieces(text)
        before = 0  # bytes of pieces without a token
        for piece in pieces:
            encoding = self.tokenizer.encode(piece, add_special_tokens=False)
            ends_L = _byte_ends(piece)
            starts = np.array([first for first, _ in encoding.offsets], dtype=np.int64)
            if not len(starts):
                before += int(ends_L[-1])
                continue
            edges = np.maximum.accumulate(np.append(starts, len(piece)))
            edges[0] = 0
            lengths = np.diff(ends_L[edges])
            lengths[0] += before
            before = 0
            parts.append(lengths.astype(np.uint32))
        if before and parts:
            parts[-1][-1] += before
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint32)

    def _encoded(self, pieces: Sequence[str]) -> "Iterator[Encoding]":
        start = characters = 0
        for stop, piece in enumerate(pieces, start=1):
            characters += len(piece)
            if characters >= _TOGETHER or stop == len(pieces):
                # The fast form leaves the offsets out.
                yield from self.tokenizer.encode_batch_fast(
                    pieces[start:stop], add_special_tokens=False
                )
                start, characters = stop, 0

    def _pieces(self, text: str) -> list[str]:
        if len(text) <= 2 * _PIECE or not self._may_cut:
            return [text]
        pieces: list[str] = []
        start = 0
        while len(text) - start > 2 * _PIECE:
            cut = self._cut(text, start + _PIECE)
            if cut is None:
                break
            pieces.append(text[start:cut])
            start = cut
        return [*pieces, text[start:]]

    def _cut(self, text: str, after: int) -> int | None:
        """Return the first place behind `after` where the text may be cut, if one is near."""
        places = _CUT.finditer(text, after, after + _PIECE)
        for _, place in zip(range(_TRIED_CUTS), places, strict=False):
            if self._is_proved(text, place.start()):
                return place.start()
        return None

    def _is_proved(self, text: str, cut: int) -> bool:
        left, right = text[cut - _OVERLAP : cut], text[cut : cut + _OVERLAP]
        whole, before, after = self.tokenizer.encode_batch(
            [left + right, left, right], add_special_tokens=False
        )
        if not len(before) or not len(after) or whole.ids != before.ids + after.ids:
            return False
        words = whole.word_ids
        return words[len(before) - 1] != words[len(before)]


def _ids(encoding: "Encoding") -> np.ndarray:
    return np.array(encoding.ids, dtype=np.uint32)


def _byte_ends(text: str) -> np.ndarray:
    """Return the bytes of UTF-8 before each character of a text, and of all of it: (L + 1,)."""
    codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
    widths = 1 + (codes > 0x7F).astype(np.int64) + (codes > 0x7FF) + (codes > 0xFFFF)
    return np.append(0, np.cumsum(widths))


def _may_cut(tokenizer: "Tokenizer") -> bool:
    """Return whether the words behind a cut between two words depend on nothing before it."""
    record: dict[str, Any] = json.loads(tokenizer.to_str())
    words, normalizers = _steps(record["pre_tokenizer"]), _steps(record["normalizer"])
    patterns = (step["pattern"].get("Regex", "") for step in words if step["type"] == "Split")
    return (
        bool(words)
        and all(step["type"] in _CUTTING for step in words)
        and all(step["type"] in _LOCAL_NORMALIZERS for step in normalizers)
        and not any(_LOOKS_BACK.search(_CLASS.sub("", pattern)) for pattern in patterns)
    )


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    if part is None:
        return []
    inner = part.get("pretokenizers") or part.get("normalizers")
    return (
        [step for each in inner or [] for step in _steps(each)]
        if part["type"] == "Sequence"
        else [part]
    )
