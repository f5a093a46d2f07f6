"""Chat templates: Jinja texts that write conversations, run as transformers runs them.

Targets are the text between `{% generation %}` marks. A template without them is asked for the
conversation up to each answer and including it, and the difference is the target; it must then
write a turn the same way, whatever follows.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from titan_loop.errors import UserError, first_line
from titan_loop.text.chatml import CHAT_TEMPLATE
from titan_loop.text.conversation import ASSISTANT, USER, Conversation, Turn

if TYPE_CHECKING:
    from jinja2 import Template

# Not characters of any text, by Unicode's definition.
_BEGIN, _END, _HERE = "\ufdd0begin\ufdd0", "\ufdd0end\ufdd0", "\ufdd0here\ufdd0"
EXAMPLE = Conversation((Turn(USER, "Hi"), Turn(ASSISTANT, "Hello!")))


class AnswersNotFoundError(TypeError):
    """A template gives no way to tell which text the assistant is to say."""


class Answer(NamedTuple):
    """Where an assistant's turn stands in a rendered text, without its header."""

    start: int
    end: int
    is_target: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """One template.

    Attributes:
        variables: Special tokens that it may use, such as `bos_token`.
        now: The time that `strftime_now` tells; None for the real one.
    """

    text: str = CHAT_TEMPLATE
    variables: Mapping[str, str] = field(default_factory=dict)
    now: datetime | None = None

    @property
    def has_marks(self) -> bool:
        """Whether the template itself says what is trained on."""
        return "endgeneration" in self.text

    def check(self) -> None:
        """Raise `UserError` for a template that cannot write a question and an answer."""
        from jinja2.exceptions import TemplateSyntaxError

        try:
            _, answers = self.render(EXAMPLE)
        except TemplateSyntaxError as error:
            raise UserError(f"chat template: line {error.lineno}: {error.message}") from error
        except TypeError as error:
            raise UserError(f"chat template: {error}") from error
        if not any(answer.end > answer.start for answer in answers):
            raise UserError("chat template: it leaves out what the assistant says")

    def prompt(self, conversation: Conversation) -> str:
        """Return the text up to the assistant's next answer."""
        return self._rendered(conversation, answer_next=True)[0]

    def continued(self, conversation: Conversation) -> str:
        """Return the text up to the end of the last turn's words, for an answer begun already."""
        *before, last = conversation.turns
        begun = last._replace(content=last.content.rstrip() + _HERE)
        text, _ = self._rendered(conversation._replace(turns=(*before, begun)))
        if _HERE not in text:
            raise TypeError("the chat template leaves out the last message")
        return text[: text.rindex(_HERE)]

    def render(
        self, conversation: Conversation, *, answer_next: bool = False
    ) -> tuple[str, list[Answer]]:
        """Return the text of a conversation, and where its answers are.

        Args:
            answer_next: Whether the text goes on up to the next answer, as a prompt.

        Raises:
            AnswersNotFoundError: The template's answers cannot be told from its text.
            TypeError: The template refuses the conversation.
        """
        text, marked = self._rendered(conversation, answer_next=answer_next)
        turns = [turn for turn in conversation.turns if turn.role == ASSISTANT]
        if not self.has_marks:
            marked = [*self._differences(conversation, text)]
        elif len(marked) != len(turns):
            if not all(turn.is_target for turn in turns):
                raise AnswersNotFoundError(
                    f"the chat template marks {len(marked)} texts of {len(turns)} answers, so that "
                    "an answer without loss cannot be found"
                )
            return text, [Answer(*span, True) for span in marked]
        spans = [*zip(marked, turns, strict=True)]
        for (start, end), turn in spans:
            if not all(call["name"] in text[start:end] for call in turn.calls):
                # What is left would teach an empty answer.
                raise TypeError("the chat template leaves out a tool call")
        return text, [Answer(*span, turn.is_target) for span, turn in spans]

    def _differences(self, conversation: Conversation, whole: str) -> Iterator[tuple[int, int]]:
        for index, turn in enumerate(conversation.turns):
            if turn.role != ASSISTANT:
                continue
            before = conversation._replace(turns=conversation.turns[:index])
            after = conversation._replace(turns=conversation.turns[: index + 1])
            prompt = self.prompt(before)
            closed = self._rendered(before)[0]
            spoken = self._rendered(after)[0]
            # Some templates write one more token at the end of every conversation.
            for token in () if prompt.startswith(closed) else self.variables.values():
                if closed.endswith(token) and prompt.startswith(closed.removesuffix(token)):
                    spoken = spoken.removesuffix(token)
                    break
            if not (whole.startswith(spoken) and spoken.startswith(prompt)):
                raise AnswersNotFoundError(
                    "the chat template rewrites a turn once others follow, or writes an answer "
                    "otherwise than it asks for one, and it has no {% generation %} marks: what "
                    "the model is to say cannot be told"
                )
            yield len(prompt), len(spoken)

    def _rendered(
        self, conversation: Conversation, *, answer_next: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        from jinja2.exceptions import TemplateError, TemplateSyntaxError

        try:
            marked = _compiled(self.text).render(
                messages=[turn.message() for turn in conversation.turns],
                tools=[*conversation.tools] or None,
                documents=None,
                strftime_now=(self.now or datetime.now()).strftime,
                add_generation_prompt=answer_next,
                **self.variables,
            )
        except TemplateSyntaxError:
            raise
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise TypeError(f"the chat template fails: {first_line(error)}") from error
        parts = marked.split(_BEGIN)
        text, spans = parts[0], []
        for part in parts[1:]:
            inside, outside = part.split(_END, 1)
            spans.append((len(text), len(text) + len(inside)))
            text += inside + outside
        return text, spans


@lru_cache(maxsize=8)
def _compiled(text: str) -> "Template":
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import CallBlock
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Marks(Extension):
        """`{% generation %}`: writes marks around its text."""

        tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_marked")
            return CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Sequence[str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja2's own escapes for HTML and sorts.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=None if separators is None else (separators[0], separators[1]),
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Marks, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(text)
