"""Masks against the tokenizer's own view of the whole ChatML text, and through a stored source."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_loop.data.inspect_source import show_source, verify_source
from titan_loop.data.labels import IGNORED
from titan_loop.data.prefix import prefix_of
from titan_loop.data.prepare.tokenize_source import tokenize_source
from titan_loop.data.shards import TokenShards
from titan_loop.text.chat_encoding import ChatEncoder
from titan_loop.text.chat_template import ChatTemplate
from titan_loop.text.conversation import Conversation, Turn, parse_conversation
from titan_loop.text.tokenizer import load_tokenizer

EOS = "<|endoftext|>"
CHATS = [
    [Turn("user", "What is 1 + 1?"), Turn("assistant", "It is 2.")],
    [
        Turn("system", "Be brief: naïve 🙂."),
        Turn("user", "Hi"),
        Turn("assistant", "Hello!"),
        Turn("user", "And 漢字?"),
        Turn("assistant", "Größe\n\n  12 of them."),
    ],
    [Turn("user", "Do you wait?"), Turn("assistant", "Yes."), Turn("user", "Good.")],
]


def reference(text: str, path: Path) -> tuple[list[int], list[bool]]:
    """Tokenise the whole text, control tokens recognised in it, and mark by character offsets."""
    tokenizer = load_tokenizer(path)
    encoding = tokenizer.encode(text + EOS)
    spans = [
        (match.start(1), match.end(1))
        for match in re.finditer(
            r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text, flags=re.DOTALL
        )
    ]
    is_target = [any(start <= first < end for start, end in spans) for first, _ in encoding.offsets]
    return encoding.ids, is_target


def encode(path: Path, chats: list[list[Turn]]) -> list[tuple[list[int], list[bool]]]:
    encoder = ChatEncoder(load_tokenizer(path), ChatTemplate())
    encoded = encoder.encode([Conversation(tuple(chat)) for chat in chats], EOS)
    return [(ids.tolist(), mask.tolist()) for ids, mask in encoded]


def render(chat: list[Turn]) -> str:
    return ChatTemplate().render(Conversation(tuple(chat)))[0]


def test_targets_spell_what_the_assistant_says(small_tokenizer):
    tokenizer = load_tokenizer(small_tokenizer)
    contents = st.text(min_size=1).filter(lambda text: bool(text.strip()))
    roles = st.sampled_from(["user", "assistant", "system"])
    turns = st.tuples(roles, contents).map(lambda both: Turn(*both))

    @given(st.lists(turns, min_size=1, max_size=5))
    def check(chat: list[Turn]) -> None:
        ((ids, mask),) = encode(small_tokenizer, [chat])
        # One run of targets per assistant turn: its words, then the end of its turn.
        runs = "".join("1" if target else "0" for target in mask).split("0")
        position = 0
        spoken = []
        for run in runs:
            if run:
                spoken.append(tokenizer.decode(ids[position : position + len(run)], False))
            position += len(run) + 1
        assert spoken == [turn.content + "<|im_end|>" for turn in chat if turn.role == "assistant"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == render(chat) + EOS
        # Control tokens come from the template alone, whatever messages spell.
        assert [ids.count(control) for control in (0, 1, 2)] == [1, len(chat), len(chat)]

    check()


@pytest.mark.parametrize("weight", [None, 0])
def test_the_first_question_is_the_prefix_in_training_and_in_a_prompt(small_tokenizer, weight):
    messages = [turn.message() for turn in CHATS[1]]
    messages[2]["weight"] = weight
    conversation = parse_conversation({"messages": messages})
    encoder = ChatEncoder(load_tokenizer(small_tokenizer), ChatTemplate())
    ((ids, mask),) = encoder.encode([conversation], EOS)
    labels = torch.from_numpy(np.where(mask[1:], ids[1:], IGNORED))[None]
    column = prefix_of(torch.arange(len(labels[0]))[None], labels)
    asked = encoder.prompt(conversation._replace(turns=conversation.turns[:-1]))
    assert int(column.sum()) == asked.question_tokens
    assert (asked.question_tokens == len(asked.ids)) == (weight == 0)  # then it is no answer


def test_a_chat_source_stores_masks_beside_tokens(small_tokenizer, tmp_path):
    records = [{"messages": [turn._asdict() for turn in chat]} for chat in CHATS * 10]
    for number, record in enumerate(records):
        record["messages"][0]["content"] += f" {number}"
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    out, options = tmp_path / "out", {"tokenizer": small_tokenizer, "chat": True}
    card = tokenize_source(path, output=out, held_out_fraction=0.3, **options)
    assert card.has_loss_mask
    texts = [render([*parse_conversation(record).turns]) for record in records]
    expected = {text: reference(text, small_tokenizer) for text in texts}
    for split in ("train", "held_out"):
        shards = TokenShards(out, split)
        ids, ends = shards.read(0, shards.tokens)
        mask = shards.read_mask(0, shards.tokens)
        assert card.splits[split].loss_tokens == mask.sum()
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            text = load_tokenizer(small_tokenizer).decode(ids[start : end - 1], False)
            targets = mask[start:end].astype(bool).tolist()
            assert expected.pop(text) == (ids[start:end].tolist(), targets)
    assert not expected
    assert list(verify_source(out)) == []
    shown = next(show_source(out))
    assert re.search(r"<\|im_start\|>assistant\n⟦[^⟦⟧]+<\|im_end\|>⟧\n", shown.text)
    assert shown.text.count("⟦") == shown.text.count("<|im_start|>assistant")
