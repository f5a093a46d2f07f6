"""Templates of sources: on their cards, in mixtures, and in prompts."""

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from titan_loop.data.load.mixture import parse_mixture
from titan_loop.data.load.mixture_sources import read_cards
from titan_loop.data.prepare.chat_records import ChatRecords
from titan_loop.data.prepare.tokenize_source import tokenize_source
from titan_loop.data.source_card import SourceCard, text_format
from titan_loop.errors import UserError
from titan_loop.text.chat_encoding import ChatEncoder
from titan_loop.text.chat_template import ChatTemplate
from titan_loop.text.conversation import Conversation, Turn, parse_messages
from titan_loop.text.tokenizer import load_tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
ASKED = Conversation(tuple(parse_messages([{"role": "user", "content": "1+1?"}])))
REWRITING = (
    "{% for m in messages %}[{{ m.role }}] {% if loop.last %}{{ m.content }}{% endif %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def sources(small_tokenizer, tmp_path_factory) -> Path:
    """Return a folder with sources in ChatML, in a template of its own, and of text."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "own").mkdir()
    tokenizer = folder / "own" / "tokenizer.json"
    tokenizer.write_bytes(small_tokenizer.read_bytes())
    (folder / "own" / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "own" / "chat_template.jinja").write_text(TEMPLATE)
    record = {"question": "1+1?", "answer": "2", "text": "1+1"}
    (folder / "a.jsonl").write_text(json.dumps(record) + "\n")
    options = {"tokenizer": tokenizer, "held_out_fraction": 0}
    for name, more in {
        "text": {},
        "others": {"eos_token": "<|im_end|>"},
        "chatml": {"chat": True},
        "template": {"chat": True, "chat_template": "tokenizer"},
    }.items():
        tokenize_source(folder / "a.jsonl", output=folder / name, **options, **more)
    return folder


def test_a_card_keeps_the_template_for_prompts(sources):
    cards = [SourceCard.read(sources / name) for name in ("text", "template")]
    tokenizer = load_tokenizer(sources / "text" / "tokenizer.json")
    text = text_format(cards, tokenizer)
    assert (text.chat_template, text.turn_end) == (TEMPLATE, "<|im_end|>")
    ends = replace(cards[1], eos_id=2)  # of chats, which their template may end
    assert text_format([ends, cards[0]], tokenizer) == text
    ids = ChatEncoder(tokenizer, text.template).prompt(ASKED).ids
    assert tokenizer.decode(ids, False) == "[user] 1+1?<|im_end|>[assistant] "
    older = replace(cards[1], chat_template=None, turn_end=None)  # before templates were kept
    assert text_format([older], tokenizer).template == ChatTemplate()


def test_the_text_that_decides_the_split_has_no_date_of_its_preparation():
    template = ChatTemplate(text="{{ strftime_now('%Y') }}" + TEMPLATE)
    conversation = {"question": "1+1?", "answer": "2"}
    assert ChatRecords(template=template).read(conversation)[0].startswith("2000[user]")
    assert template.prompt(ASKED).startswith(str(datetime.now().year))


def test_sources_with_different_templates_or_ends_are_not_mixed(sources):
    def mixed(*names: str) -> list[SourceCard]:
        return read_cards(parse_mixture([f"{sources / name}=1" for name in names]))

    assert len(mixed("text", "template")) == 2
    with pytest.raises(UserError, match=r"/template has another chat template than .*/chatml"):
        mixed("text", "chatml", "template")
    with pytest.raises(UserError, match=r"EOS of .*/others is token 2, that of .*/text token 0: "):
        mixed("text", "chatml", "others")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"messages_key": "dialog"}, "messages_key 'dialog' has no effect without --chat"),
        ({"chat_template": "t.jinja"}, "chat_template 't.jinja' has no effect without --chat"),
        ({"chat": True, "chat_template": "no.jinja"}, "chat_template no.jinja is not a file"),
        ({"chat": True, "chat_template": "t.jinja"}, "chat template: line 1: Unexpected end"),
        ({"chat": True, "tokenizer": "bare.json"}, r"control token '<\|im_start\|>' is not in"),
    ],
)
def test_mistakes(sources, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    Path("t.jinja").write_text("{% for m in messages %}")
    tokenizer = sources / "own" / "tokenizer.json"
    bare = json.loads(tokenizer.read_text())
    bare["added_tokens"] = bare["added_tokens"][:1]
    for token in ("<|im_start|>", "<|im_end|>"):
        del bare["model"]["vocab"][token]
    Path("bare.json").write_text(json.dumps(bare))
    with pytest.raises(UserError, match=message):
        tokenize_source(sources / "a.jsonl", output="out", **{"tokenizer": tokenizer, **options})


@pytest.mark.parametrize("after", ["", "\n", "\n{{ '<|endoftext|>' if not m.more }}"])
def test_a_target_ends_with_its_turn(small_tokenizer, after):
    """Whatever the template writes after that, and whichever tokens end the user's turn."""
    text = TEMPLATE.replace("{% endfor %}", f"{after}{{% endfor %}}")
    text = text.replace("not m.more", "loop.last and not add_generation_prompt")
    variables = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = load_tokenizer(small_tokenizer)
    encoder = ChatEncoder(tokenizer, ChatTemplate(text=text, variables=variables))
    turns = (*ASKED.turns, Turn("assistant", "2"), *ASKED.turns, Turn("assistant", "3"))
    ((ids, mask),) = encoder.encode([Conversation(turns)], "<|endoftext|>")
    taught = tokenizer.decode(ids[mask].tolist(), skip_special_tokens=False)
    assert taught == "2<|im_end|>3<|im_end|>"
    assert ids.tolist().count(0) == 1


def test_a_prompt_may_hold_turns_that_no_training_could_find(small_tokenizer):
    tokenizer = load_tokenizer(small_tokenizer)
    asked = Conversation((*ASKED.turns, Turn("assistant", "2"), Turn("user", "2+1?")))
    ids = ChatEncoder(tokenizer, ChatTemplate(text=REWRITING)).prompt(asked).ids
    wanted = "[user] <|im_end|>[assistant] <|im_end|>[user] 2+1?<|im_end|>[assistant] "
    assert tokenizer.decode(ids, False) == wanted
    refusing = ChatTemplate(text="{{ raise_exception('no more') }}")
    with pytest.raises(UserError, match="the chat template fails: no more"):
        ChatEncoder(tokenizer, refusing).prompt(asked)


@pytest.mark.parametrize("written", ["'(' + a + ')'", "'(' ~ a ~ ')'", "'(' ~ a | tojson ~ ')'"])
def test_arguments_of_a_call_are_an_object_and_its_json(written):
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls %}"
        "{% set a = call.function.arguments %}{{ call.function.name }}{{ " + written + " }}"
        "{% endfor %}{% endfor %}"
    )
    call = {"function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    turns = [*ASKED.turns, *parse_messages([{"role": "assistant", "tool_calls": [call]}])]
    text, _ = ChatTemplate(text=template).render(Conversation(tuple(turns)))
    assert text.endswith('<assistant>weather({"city": "Köln"})')
