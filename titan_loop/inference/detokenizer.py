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
        if "" in stop:
            raise UserError("stop='' would end every completion at once; leave it out")
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._held = ""  # the end of the returned text, which may begin a stop string
        self._go_on_from(self._whole_characters(before))

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if len(text) <= self._said or text.endswith(_BROKEN):
            return self._release("")
        # Not `DecodeStream`: it raises where byte tokens that are no character follow other ones,
        # since SentencePiece's decoder then breaks those, too.
        piece = text[self._said :]
        self._go_on_from(self._tokens[self._seen :])
        return self._release(piece)

    def rest(self) -> str:
        """Return the text held back at the end: half a character, or part of a stop string."""
        return self._release(self._decode(self._tokens)[self._said :], at_end=True)

    def _go_on_from(self, tokens: Sequence[int]) -> None:
        """Keep the tokens of the last piece, which decide how the next one is spelt."""
        self._tokens, self._seen, self._said = [*tokens], len(tokens), len(self._decode(tokens))

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([*tokens], skip_special_tokens=True)

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
