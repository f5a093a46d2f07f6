r"""ChatML: conversations as text, and as token ids with a mask over what the assistant says.

    <|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|endoftext|>
                                                                     ^^^^^^^^^^^ targets

Targets are the assistant's words and the `<|im_end|>` that ends its turn, after which a chat stops.
`<|endoftext|>` ends the document as in every source; it is nobody's turn and so no target. Control
tokens come from the template alone: one that is spelt out in a message stays text.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from titan_loop.text.tokenizer import require_token

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
ASSISTANT = "assistant"


class Turn(NamedTuple):
    """One message of a conversation."""

    role: str
    content: str


class ControlTokens(NamedTuple):
    """Ids of the tokens that delimit turns and documents."""

    turn_start: int
    turn_end: int
    end_of_text: int


def parse_turns(record: Mapping[str, Any]) -> list[Turn]:
    """Return the turns of a record with `messages`, or with `question` and `answer`.

    Args:
        record: `messages` is a list of objects with the strings `role` and `content`; otherwise
            `question` becomes the user's turn and `answer` the assistant's.

    Raises:
        KeyError: If the record has neither.
        TypeError: If a part of it is not a string.
        ValueError: If the assistant never speaks, so that there is nothing to learn.
    """
    messages = record.get("messages")
    if messages is not None:
        if not isinstance(messages, list):
            raise TypeError("'messages' is not a list")
        turns = [_turn(message) for message in messages]
    elif record.get("question") is not None and record.get("answer") is not None:
        turns = [Turn("user", record["question"]), Turn(ASSISTANT, record["answer"])]
        if not all(isinstance(turn.content, str) for turn in turns):
            raise TypeError("'question' or 'answer' is not a string")
    else:
        raise KeyError("neither 'messages' nor 'question' and 'answer'")
    if not any(turn.role == ASSISTANT and turn.content.strip() for turn in turns):
        raise ValueError("no assistant turn with text")
    return turns


def render(turns: Sequence[Turn]) -> str:
    """Return a conversation as ChatML text."""
    return "".join(f"{TURN_START}{role}\n{content}{TURN_END}\n" for role, content in turns)


def encode_chats(
    tokenizer: "Tokenizer", chats: Sequence[Sequence[Turn]], control: ControlTokens
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokenise conversations, each ending in the end-of-text token.

    What the assistant says is encoded apart from the header before it, as it is when a model
    answers: the prompt's tokens are fixed before the first answer token is chosen.

    Args:
        tokenizer: One that treats special tokens spelt out in texts as text
            (`encode_special_tokens`).
        chats: Conversations.
        control: From `control_tokens`.

    Returns:
        Per conversation the ids (int64) and which of them are targets (bool), both of shape (n,).
    """
    texts: list[str] = []
    for turns in chats:
        for role, content in turns:
            spoken = role == ASSISTANT
            texts += [f"{role}\n", content] if spoken else [f"{role}\n{content}"]
    texts.append("\n")
    encoded = iter(
        [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    )
    parts = [
        [
            (next(encoded), next(encoded)) if role == ASSISTANT else (next(encoded), None)
            for role, _ in turns
        ]
        for turns in chats
    ]
    newline = next(encoded)
    return [_join(chat, newline, control) for chat in parts]


def control_tokens(tokenizer: "Tokenizer", end_of_text: str) -> ControlTokens:
    """Return the ids of the control tokens.

    Raises:
        UserError: If the tokenizer lacks one.
    """
    return ControlTokens(
        *(
            require_token(tokenizer, token, "control token")
            for token in (TURN_START, TURN_END, end_of_text)
        )
    )


def _turn(message: Any) -> Turn:
    if not isinstance(message, dict):
        raise TypeError("a message is not an object")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise TypeError("'role' or 'content' of a message is not a string")
    return Turn(role, content)


def _join(
    turns: Sequence[tuple[list[int], list[int] | None]], newline: list[int], control: ControlTokens
) -> tuple[np.ndarray, np.ndarray]:
    ids: list[int] = []
    is_target: list[bool] = []
    for prompt, answer in turns:
        spoken = [] if answer is None else [*answer, control.turn_end]
        silent_end = [control.turn_end] if answer is None else []
        ids += [control.turn_start, *prompt, *spoken, *silent_end, *newline]
        is_target += [False] * (1 + len(prompt)) + [True] * len(spoken)
        is_target += [False] * (len(silent_end) + len(newline))
    ids.append(control.end_of_text)
    is_target.append(False)
    return np.asarray(ids, dtype=np.int64), np.asarray(is_target, dtype=bool)
