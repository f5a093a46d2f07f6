"""Conversations as people store them, read into one form.

| record | becomes |
|---|---|
| `messages`, `conversations` or `chosen_messages`: a list, or its JSON | these, and `chosen` |
| `prompt` with `completion`, `chosen` or `response`: text or messages | both, one after the other |
| `chosen`: a list that begins with the user's turn | that list |
| `question` with `answer`, `instruction` with `output` or `response` | two turns |

`input` or `context` follows a question after an empty line; `history` is pairs of earlier questions
and answers; `system` or `system_prompt` becomes the first turn, and `tools` or `functions` are what
the assistant may call. A rejected answer, or a record whose `label` is false or 0, is not read.
A message has `role` or `from` and `content` or `value`: a string, or parts of text.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
_CALL = "call"
_NAMES = {
    SYSTEM: ("system", "developer"),
    USER: ("user", "human", "prompter"),
    ASSISTANT: ("assistant", "gpt", "chatgpt", "model", "bot", "chatbot", "ai"),
    TOOL: ("tool", "function", "observation", "ipython", "tool_response"),
    _CALL: ("function_call", "tool_call"),  # ShareGPT's turn whose text is the JSON of a call
}
_ROLES = {name: role for role, names in _NAMES.items() for name in names}

_LISTS = ("messages", "conversations", "chosen_messages")
_PAIRS = (
    ("question", "answer"),
    ("prompt", "completion"),
    ("prompt", "chosen"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "chosen"),
    ("question", "response"),
)
_ADDITIONS = ("input", "context")
_SYSTEM_PROMPTS = ("system", "system_prompt")
_TOOLS = ("tools", "functions")
_WEIGHTS = ("weight", "loss_weight", "loss", "train", "training")
_LABELS = ("label", "kto_tag")
_NO = ("false", "0", "0.0")  # CSV writes words, and a column with gaps fractions
_NOT_TEXT = ("image", "images", "audio", "audios", "video", "videos")
_QUESTIONS_AND_ANSWERS = dict.fromkeys(name for pair in _PAIRS for name in pair)
CONVERSATION_FIELDS = (
    *(*_LISTS, *_QUESTIONS_AND_ANSWERS, *_ADDITIONS, *_SYSTEM_PROMPTS, *_TOOLS),
    *("history", *_LABELS, *_NOT_TEXT),
)
"""Every field of a record that `parse_conversation` may read."""

_MOST_LEVELS = 100  # templates write what they are given by recursion
_RESPONSE = re.compile("<tool_response>(.*?)</tool_response>", re.DOTALL)


class RejectedError(ValueError):
    """A record says that its answer is a bad one."""


class _Arguments(dict[str, Any]):
    """Arguments of a call, JSON where a template (DeepSeek's) joins or prints them as a text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: object) -> str:
        return f"{self}{other}"

    def __radd__(self, other: object) -> str:
        return f"{other}{self}"


class Turn(NamedTuple):
    """One message of a conversation.

    Attributes:
        role: `SYSTEM`, `USER`, `ASSISTANT` or `TOOL`.
        reasoning: The assistant's thoughts before its words.
        calls: Objects with the `name` and `arguments` of a tool, and perhaps an `id`.
        has_loss: Whether the record lets the assistant's turn be trained on.
        name: Name of the tool that answers, or of the speaker.
        call_id: Which call a tool answers.
    """

    role: str
    content: str
    reasoning: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()
    has_loss: bool = True
    name: str = ""
    call_id: str = ""

    @property
    def is_target(self) -> bool:
        """Whether to train on the turn: nobody should learn to say nothing."""
        says = bool(self.content.strip() or self.calls)
        return self.role == ASSISTANT and self.has_loss and says

    def message(self) -> dict[str, Any]:
        """Return the message that chat templates read."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:  # under both names that templates know
            message |= {"reasoning_content": self.reasoning, "thinking": self.reasoning}
        if self.calls:
            message["tool_calls"] = [
                {
                    **({"id": call["id"]} if "id" in call else {}),
                    "type": "function",
                    "function": {"name": call["name"], "arguments": _for_template(call)},
                }
                for call in self.calls
            ]
        if self.name:
            message["name"] = self.name
        if self.call_id:
            message["tool_call_id"] = self.call_id
        return message


class Conversation(NamedTuple):
    """Turns, and the tools that the assistant may call, as JSON schemas of functions."""

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    def as_json(self) -> str:
        """Return a text that `from_json` reads."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> "Conversation":
        """Return the conversation that `as_json` wrote."""
        turns, tools = json.loads(text)
        return cls(tuple(Turn(*turn) for turn in turns), tuple(tools))

    def mapped(self, change: Callable[[str], str]) -> "Conversation":
        """Return the same conversation with every text in it changed, of calls and tools too.

        Raises `TypeError` for a tool or a call that is nested too deeply to be written.
        """
        turns = [
            turn._replace(
                content=change(turn.content),
                reasoning=change(turn.reasoning),
                calls=_mapped(turn.calls, change),
                name=change(turn.name),
                call_id=change(turn.call_id),
            )
            for turn in self.turns
        ]
        return Conversation(tuple(turns), _mapped(self.tools, change))


def parse_conversation(record: Mapping[str, Any], messages_key: str | None = None) -> Conversation:
    """Return the conversation of a record of any of the shapes above.

    Args:
        messages_key: Field that holds the messages, instead of `messages` or `conversations`.

    Raises:
        KeyError: The record has none of the shapes.
        TypeError: A part of it cannot be read; the text names it.
        RejectedError: The record says that its answer is a bad one.
        ValueError: The assistant never speaks, so that there is nothing to learn.
    """
    lists = _LISTS if messages_key is None else (messages_key,)
    if (name := next(filter(record.get, _NOT_TEXT), None)) is not None:
        raise TypeError(f"{name!r} is not empty, and only text can be trained on")
    if (name := _present(record, lists)) is not None:
        turns = _turns(record[name], name)
        if turns and turns[-1].role != ASSISTANT and record.get("chosen") is not None:
            answers = _answer(record["chosen"], "chosen")
            turns = answers if _is_whole(answers) else turns + answers
    elif messages_key is not None:
        raise KeyError(f"no {messages_key!r} (fields: {_names(record)})")
    else:
        turns = _asked(record)
    if (name := _present(record, _SYSTEM_PROMPTS)) is not None:
        system = Turn(SYSTEM, _string(record[name], name))
        if system.content and system not in turns[:1]:
            if turns and turns[0].role == SYSTEM:
                raise TypeError(f"{name!r} and the first message are two system prompts")
            turns = [system, *turns]
    tools = next((_tools(record[name], name) for name in _TOOLS if record.get(name)), ())
    if (name := next((n for n in _LABELS if str(record.get(n)).lower() in _NO), None)) is not None:
        raise RejectedError(f"{name!r} is {record[name]}: its answer is a bad one")
    if not any(turn.is_target for turn in turns):
        raise ValueError("no assistant turn with text or a call to train on")
    return Conversation(tuple(turns), tools).mapped(_encodable)


def parse_messages(messages: Iterable[Mapping[str, Any]]) -> list[Turn]:
    """Return the turns of a list of messages; `TypeError` names what cannot be read."""
    return [turn for message in messages for turn in _apart(_turn(message))]


def _asked(record: Mapping[str, Any]) -> list[Turn]:
    pairs = (pair for pair in _PAIRS if all(record.get(name) is not None for name in pair))
    if (pair := next(pairs, None)) is None:
        if isinstance(record.get("chosen"), list):
            return _turns(record["chosen"], "chosen")
        raise KeyError(
            f"no messages, or a question and its answer (fields: {_names(record)}); "
            "--messages-key names a field that holds messages"
        )
    question, answer = pair
    answers = _answer(record[answer], answer)
    if _is_whole(answers):
        return answers
    if not isinstance(record[question], str):
        return _turns(record[question], question) + answers
    texts = [record[question]]
    if (addition := _present(record, _ADDITIONS)) is not None:
        texts.append(_string(record[addition], addition))
    history: list[Turn] = []
    for pair in record.get("history") or ():
        if not isinstance(pair, list) or len(pair) != 2:
            raise TypeError("'history' is not pairs of a question and an answer")
        history += [Turn(USER, _string(pair[0], "history")), *_answer(pair[1], "history")]
    user = Turn(USER, "\n\n".join(text for text in texts if text))
    return [*history, user, *answers]


def _is_whole(answers: Iterable[Turn]) -> bool:
    """Return whether answers are the whole conversation, as in many sets of preferences."""
    return any(turn.role == USER for turn in answers)


def _answer(value: Any, name: str) -> list[Turn]:
    if isinstance(value, str):
        return [Turn(ASSISTANT, value)]
    return _turns([value] if isinstance(value, dict) else value, name)


def _turns(value: Any, name: str) -> list[Turn]:
    value = _from_json(value, name) if isinstance(value, str) else value
    if not isinstance(value, list):
        raise TypeError(f"{name!r} is not a list of messages")
    return parse_messages(value)


def _turn(message: Any) -> Turn:
    if not isinstance(message, dict):
        raise TypeError("a message is not an object")
    said = message[key] if (key := _present(message, ("role", "from"))) is not None else None
    role = _ROLES.get(said.strip().lower()) if isinstance(said, str) else None
    if role is None:
        raise TypeError(f"a message has the role {said!r:.40} (fields: {_names(message)})")
    key = _present(message, ("content", "value"))
    content, thought, parts = _content(None if key is None else message[key], role)
    if role == _CALL:
        calls = _from_json(content, _CALL)
        return Turn(ASSISTANT, "", calls=_calls(calls if isinstance(calls, list) else [calls]))
    calls = message.get("tool_calls") or ()
    if message.get("function_call"):
        calls = [message["function_call"]]
    calls = calls or parts
    key = _present(message, ("reasoning_content", "reasoning", "thinking"))
    if key is not None:
        thought = _string(message[key], key)
    if role == ASSISTANT:
        content = content or message.get("refusal") or ""
    elif content is None and role != TOOL:
        raise TypeError(f"a message has no content (fields: {_names(message)})")
    key = _present(message, _WEIGHTS)
    weight = None if key is None else message[key]
    if weight is not None and not isinstance(weight, int | float):
        raise TypeError(f"a message has the weight {weight!r:.40}, which is not a number")
    return Turn(
        role,
        content or "" if role == TOOL else _string(content, "content"),
        reasoning=thought,
        calls=_calls(calls),
        has_loss=weight is None or weight != 0,
        name=str(message.get("name") or ""),
        call_id=str(message.get("tool_call_id") or ""),
    )


def _content(value: Any, role: str) -> tuple[str | None, str, list[Any]]:
    """Return a message's text, None without any, and the reasoning and calls among its parts."""
    if isinstance(value, dict) and role in (TOOL, _CALL):
        return json.dumps(value, ensure_ascii=False), "", []
    if value is None or isinstance(value, str):
        return value, "", []
    if not isinstance(value, list):
        raise TypeError("the content of a message is neither a string nor a list of parts")
    texts: dict[str, list[str]] = {"text": [], "thinking": [], "tool_call": []}
    for part in value:
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        if not isinstance(part, dict):
            raise TypeError("a part of a message is not an object")
        kind = part.get("type") or "text"
        name = {"input_text": "text", "output_text": "text", "reasoning": "thinking"}.get(
            kind, kind
        )
        if name not in texts:
            raise TypeError(f"a message has a part of type {kind!r:.40}, which is not text")
        key = _present(part, (name, "text", "value"))
        texts[name].append(_string(None if key is None else part[key], f"a part of type {kind}"))
    calls = [_from_json(call, "tool_call") for call in texts["tool_call"]]
    return "".join(texts["text"]), "".join(texts["thinking"]), calls


def _calls(calls: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(calls, list | tuple):
        raise TypeError("'tool_calls' is not a list")
    return tuple(_call(call) for call in calls)


def _call(call: Any) -> Mapping[str, Any]:
    if not isinstance(call, dict):
        raise TypeError("a tool call is not an object")
    function = call["function"] if isinstance(call.get("function"), dict) else call
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str):
        raise TypeError(f"a tool call has no name (fields: {_names(function)})")
    if isinstance(arguments, str):
        arguments = _from_json(arguments, "arguments") if arguments.strip() else {}
    number = {} if call.get("id") is None else {"id": call["id"]}
    return {"name": name, "arguments": {} if arguments is None else arguments, **number}


def _for_template(call: Mapping[str, Any]) -> Any:
    arguments = call["arguments"]
    return _Arguments(arguments) if isinstance(arguments, dict) else arguments


def _tools(value: Any, name: str) -> tuple[Mapping[str, Any], ...]:
    value = _from_json(value, name) if isinstance(value, str) and value.strip() else value
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise TypeError(f"{name!r} is not a list of objects")
    return tuple(
        tool if "function" in tool else {"type": "function", "function": tool} for tool in value
    )


def _apart(turn: Turn) -> list[Turn]:
    """Return a tool's answers without the tags that a template puts around each of them."""
    answers = _RESPONSE.findall(turn.content) if turn.role == TOOL else []
    if not answers or _RESPONSE.sub("", turn.content).strip():
        return [turn]
    return [turn._replace(content=answer.strip()) for answer in answers]


def _from_json(text: Any, name: str) -> Any:
    try:
        return json.loads(text or "")
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{name!r} is a string, but not of JSON ({error})") from error


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name!r} is not a string")
    return value


def _present(record: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return the first of the fields that has a value; tables give absent ones as None."""
    return next((name for name in names if record.get(name) is not None), None)


def _names(record: Mapping[str, Any]) -> str:
    return ", ".join(map(str, record)) or "none"


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON within a string may hold one
        raise TypeError("a message holds half of a surrogate pair") from error
    return text


def _mapped(value: Any, change: Callable[[str], str], levels: int = _MOST_LEVELS) -> Any:
    if not levels:
        raise TypeError(f"a tool or a call is nested more than {_MOST_LEVELS} levels deep")
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _mapped(item, change, levels - 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, change, levels - 1) for item in value)
    return value
