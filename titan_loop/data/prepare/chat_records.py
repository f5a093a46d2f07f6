"""Reading of records as conversations, in a preparation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from titan_loop.errors import UserError
from titan_loop.text.chat_encoding import ChatEncoder
from titan_loop.text.chat_template import ChatTemplate
from titan_loop.text.chatml import CHAT_TEMPLATE, require_chatml
from titan_loop.text.conversation import CONVERSATION_FIELDS, Conversation, parse_conversation

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONVERSATION = "conversation"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRecords:
    """The template of conversations, and the field of their messages; None for the usual ones."""

    template: ChatTemplate
    messages_key: str | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of a record that are read."""
        own = () if self.messages_key is None else (self.messages_key,)
        return (*own, *CONVERSATION_FIELDS)

    def read(self, record: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
        """Return a conversation's text, and its document's metadata.

        Raises as `parse_conversation` and `ChatTemplate.render` do.
        """
        conversation = parse_conversation(record, self.messages_key)
        # This text decides which documents are held out or duplicates, on every day the same ones.
        text, _ = replace(self.template, now=datetime(2000, 1, 1)).render(conversation)
        return text, {_CONVERSATION: conversation.as_json()}

    def settings(self) -> dict[str, Any]:
        """Return what a restart must repeat."""
        template = {"text": self.template.text, "variables": dict(self.template.variables)}
        return {"chat_template": template, "messages_key": self.messages_key}

    def on_card(self, tokenizer: "Tokenizer") -> dict[str, Any]:
        """Return the fields of a source's card; `UserError` for a tokenizer that does not fit."""
        if self.template.text == CHAT_TEMPLATE:
            require_chatml(tokenizer)
            return {}
        self.template.check()
        turn_end = ChatEncoder(tokenizer, self.template).turn_end()
        if turn_end is None:
            raise UserError(
                "chat_template: no special token ends the assistant's turn, so that generation "
                "could not stop there: write the tokenizer's end-of-sequence token after it"
            )
        return {
            "chat_template": self.template.text,
            "template_variables": dict(self.template.variables),
            "turn_end": turn_end,
        }


def conversation_of(metadata: Mapping[str, Any]) -> Conversation:
    """Return the conversation that `ChatRecords.read` put into a document's metadata."""
    return Conversation.from_json(metadata[_CONVERSATION])


def without_nulls(value: Any) -> Any:
    """Return a table's row without nulls.

    A column of objects has the fields of all of them: a null is the field of another's tool.
    """
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [*map(without_nulls, value)] if isinstance(value, list) else value
