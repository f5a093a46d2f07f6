"""Conversations: which turns are targets, and what is counted."""

from tests.data.shapes.shape import Shape
from tests.data.shapes.writing import json_lines

_CHATS = "Chats, with `--chat`"

ROWS = (
    Shape(
        section=_CHATS,
        found="`messages` of `role` and `content`",
        taken="ChatML; the assistant's words and the end of its turn are targets",
        make=lambda folder: (folder / "a.jsonl").write_bytes(
            json_lines(
                [
                    {
                        "messages": [
                            {"role": "user", "content": "1+1?"},
                            {"role": "assistant", "content": "2"},
                        ]
                    }
                ]
            )
        ),
        options={"chat": True},
        train=("<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n",),
        targets=("2<|im_end|>",),
    ),
)
