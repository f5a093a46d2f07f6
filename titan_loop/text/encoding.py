"""Encoding of whole documents: their ids, and the bytes of text behind each id."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from titan_loop.errors import UserError
from titan_loop.text.tokenizer import load_tokenizer, token_byte_lengths

if TYPE_CHECKING:
    from pathlib import Path


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

    def ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids (uint32) of each text, without the tokens of the template.

        It takes about 230 bytes of memory per character while it runs.
        """
        try:  # the fast form leaves the offsets out
            encodings = self.tokenizer.encode_batch_fast([*texts], add_special_tokens=False)
        except Exception as error:
            if type(error) is not Exception:  # the Rust side raises bare ones
                raise
            raise UserError(
                f"the tokenizer cannot encode a text ({error}): give one that has bytes or a token "
                "for unknown words"
            ) from error
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def bytes_of(self, text: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the bytes of a text behind each of its ids (int64); no text gives zeros."""
        n_bytes = len(text.encode())
        if not n_bytes:
            return np.zeros(len(ids), dtype=np.int64)
        if self.table is not None:
            found = self.table[np.asarray(ids, dtype=np.int64)]
            if int(found.sum()) == n_bytes:
                return found
        found = self.bytes_by_offset(text)
        if len(found) != len(ids):  # other ids than of the text alone, as in the middle of a chat
            found = np.diff(np.linspace(0, n_bytes, len(ids) + 1).astype(np.int64))
        return found

    def bytes_by_offset(self, text: str) -> np.ndarray:
        """Return the bytes of the text behind each of its ids (int64); their sum is the text's.

        A token has the characters from its offset to the next token's, so that what a normalizer
        or a pre-tokenizer drops counts, too. Of tokens that share a character, the last one has it.
        """
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        starts = np.array([first for first, _ in encoding.offsets], dtype=np.int64)
        if not len(starts):
            return np.zeros(0, dtype=np.int64)
        edges = np.maximum.accumulate(np.append(starts, len(text)))
        edges[0] = 0
        return np.diff(_byte_ends(text)[edges])


def _byte_ends(text: str) -> np.ndarray:
    """Return the bytes of UTF-8 before each character of a text, and of all of it: (L + 1,)."""
    codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
    widths = 1 + (codes > 0x7F).astype(np.int64) + (codes > 0x7FF) + (codes > 0xFFFF)
    return np.append(0, np.cumsum(widths))
