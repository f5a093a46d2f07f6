"""Conversations: how they are written, which turns are targets, and what is counted."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.data.shapes.shape import TEXTS, Contents, Rows, Shape, json_lines, jsonl, parquet
from titan_loop.data.prepare.make_tokenizer import train_tokenizer

_SUM = {"type": "object", "properties": {"a": {"type": "integer"}}}
_FUNCTION = {"name": "add", "description": "Adds <é>", "parameters": _SUM}
_TOOL = '{"type": "function", "function": ' + json.dumps(_FUNCTION, ensure_ascii=False) + "}"
_TOOLS = (
    f"You can call these functions:\n<tools>\n{_TOOL}\n</tools>\n"
    "To call one, write its name and its arguments as JSON:\n"
    '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
)
_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
_END = "<|im_end|>"
_USER, _ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}


def _chatml(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}{_END}\n" for role, text in turns)


_PLAIN = _chatml(("user", "1+1?"), ("assistant", "2"))
_TWICE = _chatml(("user", "1+1?"), ("assistant", "2"), ("user", "2+1?"), ("assistant", "3"))


def _calling(**call: Any) -> list[dict[str, Any]]:
    """Return messages with a call and its answer."""
    done = {"role": "tool", "tool_call_id": "c", "content": "2"}
    return [_USER, {"role": "assistant", **call}, done, _ANSWER]


def _called(arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}


_WITH_CALL = _chatml(
    ("user", "1+1?"),
    ("assistant", _CALL),
    ("tool", "<tool_response>\n2\n</tool_response>"),
    ("assistant", "2"),
)
_CALL_TARGETS = f"{_CALL}{_END}2{_END}"


def _chat(
    chats: list[dict[str, Any]] | Contents,
    train: str | tuple[str, ...] = _PLAIN,
    targets: str | tuple[str, ...] = f"2{_END}",
    *,
    options: Mapping[str, Any] | None = None,
    **rest: Any,
) -> Shape:
    """Return a row of chats."""
    return Shape(
        {"a.jsonl": json_lines(chats)} if isinstance(chats, list) else chats,
        options={"chat": True, **(options or {})},
        train=(train,) if isinstance(train, str) else train,
        targets=(targets,) if isinstance(targets, str) else targets,
        **{"inputs": ("a.jsonl",), **rest},
    )


def _messages(*messages: Mapping[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return [{"messages": [*messages], **fields}]


def _sharegpt(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": role, "value": text} for role, text in turns]


def _with_template(text: str) -> Contents:
    return {"a.jsonl": json_lines(_messages(_USER, _ANSWER, *_MORE)), "t.jinja": text}


def _own_template(folder: Path) -> Path:
    """Write a tokenizer with a template of its own beside it."""
    own = folder / "own"
    own.mkdir()
    settings = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"}
    settings["chat_template"] = _BRACKETS
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "text.jsonl").write_bytes(jsonl(TEXTS))
    return train_tokenizer(folder / "text.jsonl", vocab_size=270, output=own)


_MORE = ({"role": "user", "content": "2+1?"}, {"role": "assistant", "content": "3"})
_BRACKETS = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
_MARKED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'user' %}{{ m.content }}<|im_end|>"
    "{% else %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endif %}{{ '\\n' }}"
    "{% endfor %}"
)
_FORGETFUL = (
    "{% for m in messages %}[{{ m.role }}] {% if loop.last or m.role == 'user' %}{{ m.content }}"
    "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)

ROWS: Rows = {
    # Chats, with `--chat`: records
    "messages": _chat(_messages(_USER, _ANSWER)),
    "messages as a string": _chat([{"messages": json.dumps([_USER, _ANSWER])}]),
    "messages-key": _chat([{"dialog": [_USER, _ANSWER]}], options={"messages_key": "dialog"}),
    "messages in Parquet": _chat(
        {
            "a.parquet": parquet(
                {
                    "messages": [
                        [{**_USER, "weight": None}, _ANSWER],
                        _calling(content=None, tool_calls=[_called({"a": 1, "b": None})]),
                    ]
                }
            )
        },
        (_PLAIN, _WITH_CALL),
        (f"2{_END}", _CALL_TARGETS),
        inputs=("a.parquet",),
    ),
    "ShareGPT": _chat([{"conversations": _sharegpt(("human", "1+1?"), ("gpt", "2"))}]),
    "question and answer": _chat(
        [{"question": "1+1?", "context": "In Z.", "answer": "2", "system": "Count."}],
        _chatml(("system", "Count."), ("user", "1+1?\n\nIn Z."), ("assistant", "2")),
    ),
    "Alpaca": _chat(
        [
            {"instruction": "Add.", "input": "1 1", "output": "2"},
            {"instruction": "1+1?", "input": "", "output": "2"},
        ],
        (_chatml(("user", "Add.\n\n1 1"), ("assistant", "2")), _PLAIN),
        (f"2{_END}", f"2{_END}"),
    ),
    "Alpaca with history": _chat(
        [{"instruction": "2+1?", "output": "3", "history": [["1+1?", "2"]]}],
        _TWICE,
        f"2{_END}3{_END}",
    ),
    "Dolly": _chat(
        [{"instruction": "Add.", "context": "1 1", "response": "2", "category": "math"}],
        _chatml(("user", "Add.\n\n1 1"), ("assistant", "2")),
    ),
    "completion": _chat([{"prompt": "1+1?", "completion": "2"}]),
    "completion of messages": _chat([{"prompt": [_USER], "completion": [_ANSWER]}]),
    "rejected labels": _chat(
        [
            {"prompt": "1+1?", "completion": "3", "label": False},
            {"prompt": "1+1?", "completion": "2", "label": True},
            {"prompt": "1+1?", "completion": "3", "label": "False"},
            *_messages(_USER, {**_ANSWER, "content": "3"}, label=False),
            *_messages(_USER, {**_ANSWER, "content": "3"}, kto_tag=False),
        ],
        dropped={"rejected": 4},
    ),
    "chosen": _chat([{"prompt": "1+1?", "chosen": "2", "rejected": "3"}]),
    "chosen conversation": _chat(
        [{"prompt": "1+1?", "chosen": [_USER, _ANSWER], "rejected": [_USER]}]
    ),
    "chosen message": _chat([{"conversations": [_USER], "chosen": {"from": "gpt", "value": "2"}}]),
    "no chat": _chat(
        [{"body": "1+1?", "reply": "2"}],
        refused=r"no messages, .* answer \(fields: body, reply\); --messages-key names",
    ),
    # Chats: messages and targets
    "roles": _chat(
        [
            {"messages": [{"role": a, "content": "1+1?"}, {"role": b, "content": "2"}]}
            for a, b in (("human", "Assistant"), ("user", "model"), ("User", "bot"))
        ]
        + _messages({"role": "developer", "content": "Count."}, _USER, _ANSWER),
        (*[_PLAIN] * 3, _chatml(("system", "Count."), ("user", "1+1?"), ("assistant", "2"))),
        (f"2{_END}",) * 4,
    ),
    "unknown role": _chat(
        _messages({"role": "narrator", "content": "Once."}, _ANSWER),
        refused=r"a message has the role 'narrator' \(fields: role, content\)",
    ),
    "parts of text": _chat(
        _messages(
            {
                "role": "user",
                "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}],
            },
            {"role": "assistant", "content": ["2"]},
        )
    ),
    "parts of calls": _chat(
        [
            {
                "chosen_messages": [
                    {"role": "user", "content": [{"type": "text", "value": "1+1?"}]},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "reasoning", "value": "Add."},
                            {
                                "type": "tool_call",
                                "value": '{"name": "add", "arguments": {"a": 1}}',
                            },
                        ],
                    },
                ],
                "rejected_messages": [],
            }
        ],
        _chatml(("user", "1+1?"), ("assistant", f"<think>\nAdd.\n</think>\n\n{_CALL}")),
        f"<think>\nAdd.\n</think>\n\n{_CALL}{_END}",
    ),
    "images": _chat(
        _messages({"role": "user", "content": "<image>What is it?"}, _ANSWER, images=["a.png"]),
        refused="'images' is not empty, and only text can be trained on",
    ),
    "parts of images": _chat(
        _messages({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, _ANSWER),
        refused="a part of type 'image_url', which is not text",
    ),
    "tool_calls": _chat(
        _messages(
            {"role": "system", "content": "Count."},
            *_calling(content="", tool_calls=[_called({"a": 1})]),
            tools=[{"type": "function", "function": _FUNCTION}],
        ),
        _chatml(("system", f"Count.\n\n{_TOOLS}")) + _WITH_CALL,
        _CALL_TARGETS,
    ),
    "tool_calls as strings": _chat(
        _messages(*_calling(content=None, tool_calls=[_called('{"a": 1}')]), functions=[_FUNCTION]),
        _chatml(("system", _TOOLS)) + _WITH_CALL,
        _CALL_TARGETS,
    ),
    "calls and words": _chat(
        _messages(_USER, {**_ANSWER, "tool_calls": [_called({"a": 1})] * 2}),
        _chatml(("user", "1+1?"), ("assistant", f"2\n{_CALL}\n{_CALL}")),
        f"2\n{_CALL}\n{_CALL}{_END}",
    ),
    "function_call": _chat(
        _messages(*_calling(content=None, function_call={"name": "add", "arguments": '{"a": 1}'})),
        _WITH_CALL,
        _CALL_TARGETS,
    ),
    "ShareGPT's calls": _chat(
        [
            {
                "conversations": _sharegpt(
                    ("human", "1+1?"),
                    ("function_call", '{"name": "add", "arguments": {"a": 1}}'),
                    ("observation", answer),
                    ("gpt", "2"),
                )
            }
            for answer in ("2", "<tool_response>\n2\n</tool_response>")
        ],
        (_WITH_CALL,) * 2,
        (_CALL_TARGETS,) * 2,
    ),
    "reasoning": _chat(
        _messages(_USER, {**_ANSWER, "reasoning_content": "Add."})
        + _messages(
            _USER,
            {**_ANSWER, "content": [{"type": "thinking", "thinking": "Add."}, "2"]},
            *_MORE,
        ),
        (
            _chatml(("user", "1+1?"), ("assistant", "<think>\nAdd.\n</think>\n\n2")),
            _TWICE.replace("assistant\n2", "assistant\n<think>\nAdd.\n</think>\n\n2"),
        ),
        (f"<think>\nAdd.\n</think>\n\n2{_END}", f"<think>\nAdd.\n</think>\n\n2{_END}3{_END}"),
    ),
    "weights": _chat(
        [
            {"messages": [_USER, {**_ANSWER, key: 0}, _MORE[0], {**_MORE[1], key: 1}]}
            for key in ("weight", "loss_weight")
        ]
        + [
            {"messages": [_USER, {**_ANSWER, key: False}, _MORE[0], {**_MORE[1], key: True}]}
            for key in ("loss", "train", "training")
        ],
        (_TWICE,) * 5,
        (f"3{_END}",) * 5,
    ),
    "empty answers": _chat(
        [
            *_messages(_USER, {"role": "assistant", "content": ""}, *_MORE),
            *_messages(_USER, {"role": "assistant", "content": None}),
            *_messages(_USER, {**_ANSWER, "weight": 0}),
        ],
        _TWICE.replace("assistant\n2", "assistant\n"),
        f"3{_END}",
        dropped={"empty": 2},
    ),
    "refusal": _chat(
        _messages(_USER, {"role": "assistant", "content": None, "refusal": "No."}),
        _chatml(("user", "1+1?"), ("assistant", "No.")),
        f"No.{_END}",
    ),
    "half a pair in a chat": _chat(
        [{"messages": json.dumps([_USER, {**_ANSWER, "content": "\ud83d"}])}],
        refused="a message holds half of a surrogate pair",
    ),
    "bad arguments": _chat(
        [
            *_messages(*_calling(tool_calls=[_called("{")])),
            *_messages(*_calling(tool_calls=[_called("[" * 200 + "]" * 200)])),
        ],
        refused="'arguments' is a string, but not of JSON .* nested more than 100 levels deep",
    ),
    "two system prompts": _chat(
        _messages({"role": "system", "content": "Count."}, _USER, _ANSWER, system="Add."),
        refused="'system' and the first message are two system prompts",
    ),
    "spelt control tokens": _chat(
        _messages({"role": "user", "content": f"1{_END}\n<|im_start|>assistant\n3"}, _ANSWER),
        _chatml(("user", f"1{_END}\n<|im_start|>assistant\n3"), ("assistant", "2")),
    ),
    "ChatML as text": Shape(
        {"a.jsonl": jsonl([_PLAIN])},
        train=(_PLAIN,),
        warned=("1 documents spell <|im_start|>, which stays text",),
    ),
    # Chats: templates
    "template with marks": _chat(
        _with_template(_MARKED),
        f"user: 1+1?{_END}\nassistant: 2{_END}\nuser: 2+1?{_END}\nassistant: 3{_END}\n",
        f"2{_END}3{_END}",
        options={"chat_template": "t.jinja"},
    ),
    "template without marks": _chat(
        _messages(_USER, _ANSWER, *_MORE),
        f"<|im_start|>[user] 1+1?{_END}[assistant] 2{_END}[user] 2+1?{_END}[assistant] 3{_END}",
        f"2{_END}3{_END}",
        tokenizer=_own_template,
        options={"chat_template": "tokenizer"},
    ),
    "template that rewrites": _chat(
        _with_template(_FORGETFUL),
        options={"chat_template": "t.jinja"},
        refused="the chat template rewrites a turn once others follow",
    ),
    "template that refuses": _chat(
        _with_template(
            "{% if messages|length > 2 %}{{ raise_exception('too long') }}{% endif %}" + _BRACKETS
        ),
        options={"chat_template": "t.jinja"},
        refused="the chat template fails: too long",
    ),
    "template without calls": _chat(
        [
            *_messages(_USER, {"role": "assistant", "content": "", "tool_calls": [_FUNCTION]}),
            *_messages(_USER, {**_ANSWER, "reasoning": "Add."}, tools=[_FUNCTION]),
        ],
        f"<|im_start|>[user] 1+1?{_END}[assistant] 2{_END}",
        tokenizer=_own_template,
        options={"chat_template": "tokenizer"},
        dropped={"malformed": 1},
    ),
    "template without end": _chat(
        _with_template(_BRACKETS.replace("<|im_end|>", "")),
        options={"chat_template": "t.jinja"},
        refused="no special token ends the assistant's turn",
    ),
    "no template": _chat(
        _messages(_USER, _ANSWER),
        options={"chat_template": "tokenizer"},
        refused="chat_template=tokenizer: .* has neither chat_template.jinja",
    ),
}
