"""Turns tokens into text as they arrive, and finds stop strings that span several tokens.

Text is held back while a character needs more tokens, or while the end of the text may be the
beginning of a stop string.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan_loop.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_LONGEST_CHARACTER = 4  # bytes, and so tokens
_BROKEN = "\ufffd"


class Detokenizer:
    """The text of one row, cut before the first stop string; `UserError` for an empty one.

    `before` are the tokens that the text goes on from, if any: SentencePiece's decoder drops the
    space at the beginning of a text.
    """

    def __init__(
        self, tokenizer: "Tokenizer", stop: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        from tokenizers.decoders import DecodeStream

        if "" in stop:
            raise UserError("stop='' would end every completion at once; leave it out")
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._decoded = 0  # characters that the decoder has returned
        self._held = ""  # the last of them, which may begin a stop string
        for token in self._whole_characters(before):
            self._tokens.append(token)
            self._decoded += len(self._decoder.step(tokenizer, token) or "")

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain."""
        self._tokens.append(token)
        piece = self._decoder.step(self._tokenizer, token) or ""
        self._decoded += len(piece)
        return self._release(piece)

    def rest(self) -> str:
        """Return the text held back at the end: half a character, or part of a stop string."""
        whole = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return self._release(whole[self._decoded :], at_end=True)

    def _whole_characters(self, before: Sequence[int]) -> Sequence[int]:
        """Return the last few of these tokens, which do not begin or end inside a character."""
        few = (before[-count:] for count in range(1, 1 + min(_LONGEST_CHARACTER, len(before))))
        whole = (each for each in few if _BROKEN not in self._tokenizer.decode([*each]))
        return next(whole, ())

    def _release(self, piece: str, *, at_end: bool = False) -> str:
        text = self._held + piece
        if found := [index for index in (text.find(stop) for stop in self._stop) if index >= 0]:
            self.stopped = True
            return text[: min(found)]
        held = 0 if at_end else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
