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


class Piece(NamedTuple):
    """A part of a document: its text, empty for control tokens, and its ids."""

    text: str
    ids: "Sequence[int] | np.ndarray"
    is_target: bool = False


class _Part(NamedTuple):
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
        if template.text == CHAT_TEMPLATE:
            for name in (TURN_START, TURN_END):
                require_token(tokenizer, name, "control token")
                tokenizer.add_special_tokens([name])  # else a message could spell it
        added = tokenizer.get_added_tokens_decoder().items()
        tokens = {token.content: (number, token) for number, token in added if token.special}
        self._controls = {name: number for name, (number, _) in tokens.items()}
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

    def pieces(self, conversations: Sequence[Conversation], end_of_text: str) -> list[list[Piece]]:
        """Return the pieces of conversations, each ended by `end_of_text`.

        A template may end a conversation with that token itself.
        """
        end = require_token(self.tokenizer, end_of_text, "control token")
        chats = self._encoded([[*self._parts(each)] for each in conversations])
        return [
            pieces if pieces and [*pieces[-1].ids[-1:]] == [end] else [*pieces, Piece("", [end])]
            for pieces in chats
        ]

    def encode(
        self, conversations: Sequence[Conversation], end_of_text: str
    ) -> "list[tuple[np.ndarray, np.ndarray]]":
        """Return int64 ids and bool target masks of conversations, as `pieces` does."""
        import numpy as np

        chats = self.pieces(conversations, end_of_text)
        return [
            (
                np.concatenate([np.asarray(piece.ids, dtype=np.int64) for piece in pieces]),
                np.concatenate([np.full(len(piece.ids), piece.is_target) for piece in pieces]),
            )
            for pieces in chats
        ]

    def prompt(self, conversation: Conversation) -> Prompt:
        """Return the ids up to the assistant's next answer, as in training.

        Raises `UserError` if the template refuses the conversation.
        """
        try:
            (pieces,) = self._encoded([[*self._parts(conversation, answer_next=True)]])
        except TypeError as error:
            raise UserError(f"{error}: use a conversation that it can write") from error
        ids: list[int] = []
        question_tokens = None
        for piece in pieces:
            if piece.is_target and question_tokens is None:
                question_tokens = len(ids)
            ids += [*piece.ids]
        return Prompt(ids, len(ids) if question_tokens is None else question_tokens)

    def turn_end(self) -> str | None:
        """Return the control token that ends an answer; None for a template without one."""
        text, (answer, *_) = self.template.render(EXAMPLE)
        inside = self._control.findall(text, answer.start, answer.end)
        after = self._control.findall(text, answer.end)
        return next((token.strip() for token in [*inside[::-1], *after]), None)

    def _parts(self, conversation: Conversation, *, answer_next: bool = False) -> Iterator[_Part]:
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
                yield _Part(control, part, after, False)
                after = "text" if control is None else "control"
            for control, part in self._split(text, answer.start, end):
                yield _Part(control, part, after, answer.is_target)
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

    def _encoded(self, chats: Sequence[Sequence[_Part]]) -> list[list[Piece]]:
        texts = {(p.text, p.after): [] for parts in chats for p in parts if p.control is None}
        contexts = ["\n" if after in self._needs_context else "" for _, after in texts]
        given = [context + text for (text, _), context in zip(texts, contexts, strict=True)]
        newline, apart, *encoded = _encode_as_text(self.tokenizer, ["\n", _SPELT, *given])
        for key, context, ids in zip(texts, contexts, encoded, strict=True):
            before = newline if context else []
            if ids[: len(before)] != before:  # the newline merged with the text
                both, alone = _encode_as_text(self.tokenizer, [_SPELT + key[0], key[0]])
                fits = both[: len(apart)] == apart
                before, ids = (apart, both) if fits else ([], alone)
            texts[key] = ids[len(before) :]
        return [
            [
                Piece(part.text, texts[part.text, part.after], part.is_target)
                if part.control is None
                else Piece("", [part.control], part.is_target)
                for part in parts
            ]
            for parts in chats
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
