r"""ChatML: conversations as text, and as token ids with a mask over the assistant's turns.

    <|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|endoftext|>
                                                                     ^^^^^^^^^^^ targets

Targets are the assistant's words and the `<|im_end|>` that ends its turn, where generation stops.
`<|endoftext|>` ends the document as in every source; it belongs to no turn, so it is not a target.
Control tokens come from the template alone: one that is spelt out in a message stays text.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from titan_loop.text.tokenizer import TURN_END, TURN_START, require_token

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

ASSISTANT = "assistant"

CHAT_TEMPLATE = f"""\
{{%- for message in messages -%}}
{{{{ '{TURN_START}' + message['role'] + '\\n' + message['content'] + '{TURN_END}' + '\\n' }}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}
{{{{ '{TURN_START}{ASSISTANT}\\n' }}}}
{{%- endif -%}}
"""
"""`render` as a Jinja template for transformers, which can also open the assistant's turn."""


class Turn(NamedTuple):
    """One message of a conversation."""

    role: str
    content: str


def parse_turns(record: Mapping[str, Any]) -> list[Turn]:
    """Return the turns of a record with `messages`: objects with the strings `role` and `content`.

    Without `messages`, `question` becomes the user's turn and `answer` the assistant's. Raises
    `KeyError` if the record has neither, `TypeError` if a part of it is not a string, and
    `ValueError` if the assistant never speaks, so that there is nothing to learn.
    """
    if (messages := record.get("messages")) is not None:
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
    tokenizer: "Tokenizer", chats: Sequence[Sequence[Turn]], end_of_text: str
) -> "list[tuple[np.ndarray, np.ndarray]]":
    """Tokenise conversations, each ended by `end_of_text`; return int64 ids and bool target masks.

    The assistant's text is encoded apart from the header before it, because a model fixes the
    tokens of the prompt before it chooses the first token of an answer.
    """
    import numpy as np

    turn_start, turn_end, end = control_tokens(tokenizer, end_of_text)
    texts = ["\n"]
    for turns in chats:
        for role, content in turns:
            texts += [f"{role}\n", content] if role == ASSISTANT else [f"{role}\n{content}"]
    newline, *encoded = _encode_as_text(tokenizer, texts)
    parts = iter(encoded)
    results: list[tuple[np.ndarray, np.ndarray]] = []
    for turns in chats:
        ids: list[int] = []
        is_target: list[bool] = []
        for role, _ in turns:
            prompt = [turn_start, *next(parts)]
            answer = [*next(parts), turn_end] if role == ASSISTANT else []
            rest = newline if answer else [turn_end, *newline]
            ids += [*prompt, *answer, *rest]
            is_target += [False] * len(prompt) + [True] * len(answer) + [False] * len(rest)
        results.append((np.asarray([*ids, end], dtype=np.int64), np.asarray([*is_target, False])))
    return results


def chat_prompt(tokenizer: "Tokenizer", turns: Sequence[Turn]) -> list[int]:
    """Return the ids of a conversation up to the assistant's next answer, as in training."""
    # An empty answer has one target, the end of its turn. The prompt is all ids before it.
    chat = [*turns, Turn(ASSISTANT, "")]
    ((ids, is_target),) = encode_chats(tokenizer, [chat], end_of_text=TURN_END)
    return ids[: is_target.nonzero()[0][-1]].tolist()


def control_tokens(tokenizer: "Tokenizer", end_of_text: str) -> tuple[int, int, int]:
    """Return the ids of the tokens that begin a turn, end a turn and end a document."""
    names = (TURN_START, TURN_END, end_of_text)
    start, end, document_end = (require_token(tokenizer, n, "control token") for n in names)
    return start, end, document_end


def _encode_as_text(tokenizer: "Tokenizer", texts: list[str]) -> list[list[int]]:
    """Encode texts; a special token that is spelt out in one stays text."""
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True  # despite the name: encode them as text
    try:
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    finally:
        tokenizer.encode_special_tokens = before
    return [encoding.ids for encoding in encodings]


def _turn(message: Any) -> Turn:
    if not isinstance(message, dict):
        raise TypeError("a message is not an object")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise TypeError("'role' or 'content' of a message is not a string")
    return Turn(role, content)
