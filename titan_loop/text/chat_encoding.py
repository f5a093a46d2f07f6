"""Conversations as token ids, with a mask over what is trained on.

Control tokens come from the template alone: one that is spelt out in a message stays text.
An answer is encoded apart from the header before it, because a model fixes the tokens of the prompt
before it chooses the first token of an answer.
"""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from titan_loop.errors import UserError
from titan_loop.text.chat_template import EXAMPLE, Answer, AnswersNotFoundError, ChatTemplate
from titan_loop.text.chatml import CHAT_TEMPLATE
from titan_loop.text.conversation import Conversation
from titan_loop.text.tokenizer import TURN_END, TURN_START, require_token

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

_After = Literal["start", "control", "text"]
_SPELT = "\ufdd1"  # not a character of any text; it keeps a spelt-out control token apart


class Prompt(NamedTuple):
    """Ids up to the next answer; `question_tokens` of them precede the first answer."""

    ids: list[int]
    question_tokens: int


class _Piece(NamedTuple):
    """A control token, or text with what stands before it."""

    control: int | None
    text: str
    after: _After
    is_target: bool


class ChatEncoder:
    """Encodes conversations with one tokenizer and one template."""

    def __init__(self, tokenizer: "Tokenizer", template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.template = template
        added = tokenizer.get_added_tokens_decoder().items()
        tokens = {token.content: (number, token) for number, token in added if token.special}
        self._controls = {name: number for name, (number, _) in tokens.items()}
        if template.text == CHAT_TEMPLATE:
            for name in (TURN_START, TURN_END):
                self._controls[name] = require_token(tokenizer, name, "control token")
        # Some tokens take the white space beside them along.
        space = {
            name: (r"\s*" if token.lstrip else "", r"\s*" if token.rstrip else "")
            for name, (_, token) in tokens.items()
        }
        names = sorted(self._controls, key=len, reverse=True)
        sides = (space.get(name, ("", "")) for name in names)
        whole = (f"{a}{re.escape(n)}{b}" for n, (a, b) in zip(names, sides, strict=True))
        self._spelt = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._control = re.compile("|".join(whole) or "(?!)")
        self._needs_context = self._places_that_matter()

    def encode(
        self, conversations: Sequence[Conversation], end_of_text: str
    ) -> "list[tuple[np.ndarray, np.ndarray]]":
        """Return int64 ids, each conversation ended by `end_of_text`, and bool target masks.

        A template may end a conversation with that token itself.
        """
        import numpy as np

        end = require_token(self.tokenizer, end_of_text, "control token")
        results: list[tuple[np.ndarray, np.ndarray]] = []
        for pieces in self._encoded([[*self._pieces(each)] for each in conversations]):
            ids = [number for numbers, _ in pieces for number in numbers]
            is_target = [target for numbers, target in pieces for _ in numbers]
            if ids[-1:] != [end]:
                ids, is_target = [*ids, end], [*is_target, False]
            results.append((np.asarray(ids, dtype=np.int64), np.asarray(is_target)))
        return results

    def texts(self, conversation: Conversation) -> list[tuple[str, Sequence[int]]]:
        """Return text and ids of every piece of a conversation; control tokens have no text."""
        pieces = [*self._pieces(conversation)]
        (encoded,) = self._encoded([pieces])
        return [
            (piece.text if piece.control is None else "", ids)
            for piece, (ids, _) in zip(pieces, encoded, strict=True)
        ]

    def prompt(self, conversation: Conversation) -> Prompt:
        """Return the ids up to the assistant's next answer, as in training.

        Raises `UserError` if the template refuses the conversation.
        """
        try:
            (pieces,) = self._encoded([[*self._pieces(conversation, answer_next=True)]])
        except TypeError as error:
            raise UserError(f"{error}: use a conversation that it can write") from error
        ids: list[int] = []
        question_tokens = None
        for numbers, is_target in pieces:
            if is_target and question_tokens is None:
                question_tokens = len(ids)
            ids += numbers
        return Prompt(ids, len(ids) if question_tokens is None else question_tokens)

    def turn_end(self) -> str | None:
        """Return the control token that ends an answer; None for a template without one."""
        text, (answer, *_) = self.template.render(EXAMPLE)
        inside = self._control.findall(text, answer.start, answer.end)
        after = self._control.findall(text, answer.end)
        return next((token.strip() for token in [*inside[::-1], *after]), None)

    def _pieces(self, conversation: Conversation, *, answer_next: bool = False) -> Iterator[_Piece]:
        broken = conversation.mapped(
            lambda text: self._spelt.sub(lambda found: found[0][0] + _SPELT + found[0][1:], text)
        )
        try:
            text, answers = self.template.render(broken, answer_next=answer_next)
        except AnswersNotFoundError:
            if not answer_next:
                raise
            text, answers = self.template.prompt(broken), []  # nothing of it is trained on
        after: _After = "start"
        begin = 0
        for answer in [*answers, Answer(len(text), len(text), False)]:
            end = answer.end if self.template.has_marks else self._turn_end(text, answer)
            for control, part in self._split(text, begin, answer.start):
                yield _Piece(control, part, after, False)
                after = "text" if control is None else "control"
            for control, part in self._split(text, answer.start, end):
                yield _Piece(control, part, after, answer.is_target)
                after = "text" if control is None else "control"
            begin = end

    def _turn_end(self, text: str, answer: Answer) -> int:
        """Return where the token that ends the turn does, if only white space follows it."""
        ends = [found.end() for found in self._control.finditer(text, answer.start, answer.end)]
        ends = [end for end in ends if not text[end : answer.end].strip()]
        return ends[-1] if ends else answer.end

    def _split(self, text: str, begin: int, end: int) -> Iterator[tuple[int | None, str]]:
        for found in self._control.finditer(text, begin, end):
            if found.start() > begin:
                yield None, text[begin : found.start()].replace(_SPELT, "")
            name = found[0]
            yield self._controls[name if name in self._controls else name.strip()], name
            begin = found.end()
        if end > begin:
            yield None, text[begin:end].replace(_SPELT, "")

    def _encoded(self, chats: Sequence[Sequence[_Piece]]) -> list[list[tuple[Sequence[int], bool]]]:
        texts = {(p.text, p.after): [] for pieces in chats for p in pieces if p.control is None}
        contexts = ["\n" if after in self._needs_context else "" for _, after in texts]
        given = [context + text for (text, _), context in zip(texts, contexts, strict=True)]
        newline, *encoded = _encode_as_text(self.tokenizer, ["\n", *given])
        for key, context, ids in zip(texts, contexts, encoded, strict=True):
            cut = len(newline) if context and ids[: len(newline)] == newline else 0
            if context and not cut:  # it merged with the text
                (ids,) = _encode_as_text(self.tokenizer, [key[0]])
            texts[key] = ids[cut:]
        return [
            [
                (texts[p.text, p.after] if p.control is None else [p.control], p.is_target)
                for p in pieces
            ]
            for pieces in chats
        ]

    def _places_that_matter(self) -> frozenset[_After]:
        """Return the places where a text's tokens are others than at a text's start.

        SentencePiece puts a space before a text, but not in its middle.
        """
        alone, newline, both = _encode_as_text(self.tokenizer, ["x", "\n", "\nx"])
        places: set[_After] = set() if both == [*newline, *alone] else {"text"}
        for name, number in self._controls.items():
            ids = self.tokenizer.encode(f"{name}x", add_special_tokens=False).ids
            if ids[:1] == [number] and ids[1:] != alone:
                places.add("control")
        return frozenset(places)


def _encode_as_text(tokenizer: "Tokenizer", texts: list[str]) -> list[list[int]]:
    """Encode texts; a special token that is spelt out in one stays text."""
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True  # despite the name: encode them as text
    try:
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    finally:
        tokenizer.encode_special_tokens = before
    return [encoding.ids for encoding in encodings]
