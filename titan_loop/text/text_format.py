"""The format of training text: the token that ends it, and the rendering of conversations."""

from dataclasses import dataclass, replace

from titan_loop.text.chatml import CHAT_TEMPLATE
from titan_loop.text.tokenizer import END_OF_TEXT, TURN_END


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFormat:
    """The end of documents and turns, and the rendering of conversations.

    Attributes:
        end_of_text: The token between documents.
        turn_end: The token that ends a turn; None where only documents end.
        chat_template: Jinja text; None for a model that knows no conversations.
    """

    end_of_text: str = END_OF_TEXT
    turn_end: str | None = None
    chat_template: str | None = None

    def with_chatml(self) -> "TextFormat":
        """Return the same documents, with ChatML conversations."""
        return replace(self, turn_end=TURN_END, chat_template=CHAT_TEMPLATE)
