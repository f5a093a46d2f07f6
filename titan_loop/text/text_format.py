"""The format of training text: the tokens around it, and the rendering of conversations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from titan_loop.text.chat_template import ChatTemplate
from titan_loop.text.tokenizer import END_OF_TEXT, TURN_END


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFormat:
    """The beginning and the end of documents, the end of turns, the rendering of conversations.

    Attributes:
        end_of_text: The token between documents.
        turn_end: The token that ends a turn; None where only documents end.
        chat_template: Jinja text; None for a model that knows no conversations.
        template_variables: Special tokens that the template may use, such as `bos_token`.
        end_tokens: Every token at which generation stops, where a model has more than these two.
        begin_of_text: The token in front of every document; None for none.
    """

    end_of_text: str = END_OF_TEXT
    turn_end: str | None = None
    chat_template: str | None = None
    template_variables: Mapping[str, str] = field(default_factory=dict)
    end_tokens: Sequence[str] = ()
    begin_of_text: str | None = None

    @property
    def knows_chats(self) -> bool:
        """Whether the text has conversations; older runs recorded the end of their turns alone."""
        return self.chat_template is not None or self.turn_end is not None

    @property
    def template(self) -> ChatTemplate:
        """The template of conversations; ChatML for a model that knows none."""
        if self.chat_template is None:
            return ChatTemplate()
        return ChatTemplate(text=self.chat_template, variables=self.template_variables)

    def with_chatml(self) -> "TextFormat":
        """Return the same documents, with ChatML conversations."""
        return self.with_template(ChatTemplate(), TURN_END)

    def with_template(self, template: ChatTemplate, turn_end: str) -> "TextFormat":
        """Return the same documents, with conversations in a template."""
        return replace(
            self,
            turn_end=turn_end,
            chat_template=template.text,
            template_variables=template.variables,
            end_tokens=(),
        )

    def with_chats_of(self, parent: "TextFormat") -> "TextFormat":
        """Return the same documents, with the conversations that a parent knows, if any."""
        if not parent.knows_chats:
            return self
        ends = parent.end_tokens or (parent.turn_end, parent.end_of_text)
        both = dict.fromkeys(token for token in (*ends, self.end_of_text) if token is not None)
        own = {"end_of_text": self.end_of_text, "begin_of_text": self.begin_of_text}
        return replace(parent, **own, end_tokens=tuple(both))

    def without_chats(self) -> "TextFormat":
        """Return the same documents, without conversations."""
        return TextFormat(end_of_text=self.end_of_text, begin_of_text=self.begin_of_text)
