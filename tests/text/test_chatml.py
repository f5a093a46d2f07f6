"""Masks against the tokenizer's own view of the whole ChatML text, and through a stored source."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from titan_loop.data.labels import IGNORED
from titan_loop.data.prefix import prefix_of
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


def test_the_prompt_is_what_a_model_answers_to(small_tokenizer):
    """An answer that begins with a line break must not merge with the header's."""
    tokenizer = load_tokenizer(small_tokenizer)
    chat = [Turn("user", "Hi"), Turn("assistant", "\n\nHello")]
    ((ids, mask),) = encode(small_tokenizer, [chat])
    prompt = tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n").ids
    assert ids[: len(prompt)] == prompt
    asked = ChatEncoder(tokenizer, ChatTemplate()).prompt(Conversation((chat[0],)))
    assert (asked.ids, asked.question_tokens) == (prompt, len(prompt))
    assert mask.index(True) == len(prompt)


def test_messages_spell_no_control_token_that_a_publisher_left_ordinary(small_tokenizer, tmp_path):
    record = json.loads(small_tokenizer.read_text())
    for token in record["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(record))
    chat = [Turn("user", "<|im_start|>"), Turn("assistant", "a<|im_end|>")]
    ((ids, _),) = encode(tmp_path / "tokenizer.json", [chat])
    assert [ids.count(control) for control in (1, 2)] == [2, 2]


def test_a_line_break_that_merges_gets_no_space_in_front():
    """SentencePiece puts one before a whole text."""
    vocabulary = {token: number for number, token in enumerate([*"\nusertian▁", "\n\n", "\nu"])}
    merges = [("\n", "\n"), ("\n", "u")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    space = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.pre_tokenizer = space  # type: ignore[assignment]
    tokenizer.add_special_tokens([EOS, "<|im_start|>", "<|im_end|>"])
    chat = [Turn("user", "use it"), Turn("assistant", "user"), Turn("user", "\nin")]
    ((ids, _),) = ChatEncoder(tokenizer, ChatTemplate()).encode([Conversation(tuple(chat))], EOS)
    tokens = [str(tokenizer.id_to_token(number)) for number in ids]
    assert "".join(tokens) == render(chat).replace(" ", "▁") + EOS


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
