"""Our chat templates beside transformers' own: texts, ids, and masks over what is trained on."""

import inspect
import json
import shlex
import statistics
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from titan_loop.text.chat_encoding import ChatEncoder
from titan_loop.text.chat_template import ChatTemplate
from titan_loop.text.chatml import CHAT_TEMPLATE
from titan_loop.text.conversation import parse_conversation

pytestmark = pytest.mark.hf5

VARIABLES = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
ADD = {
    "name": "add",
    "description": 'Adds <two> & "more"',
    "parameters": {"type": "object", "properties": {"a": {"type": "integer", "title": "é"}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": [1, None]}}}
FUNCTIONS = (json.loads, textwrap.wrap, shlex.split, statistics.median)
DOCUMENTED = [
    {"role": role, "content": text}
    for function in FUNCTIONS
    for role, text in (
        ("user", f"What does {function.__qualname__} do?"),
        ("assistant", inspect.getdoc(function) or ""),
    )
]
RECORDS: list[dict[str, Any]] = [
    {"messages": DOCUMENTED},
    {"messages": [{"role": "system", "content": "Be brief: naïve 漢字 🙂."}, *DOCUMENTED[:2]]},
    {
        "messages": [
            DOCUMENTED[0],
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "3"},
            {"role": "assistant", "content": "3", "reasoning_content": "It\nsays so."},
            {"role": "user", "content": "And  then?\n"},
            {"role": "assistant", "content": "Wait.", "tool_calls": [CALL, CALL]},
        ],
        "tools": [{"type": "function", "function": ADD}],
    },
]
HEADERS = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {{- "[assistant]" }}
        {%- MARK %}
        {{- " " + (message.content or "") | trim }}
        {%- for call in message.tool_calls or [] %}
            {{- call.function | tojson(indent=2) }}
        {%- endfor %}
        {{- eos_token }}
        {%- ENDMARK %}
    {%- else %}
        {{- "[" + message.role + "] " + message.content | trim + "\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "[assistant]" }}{% endif %}
"""
MARKED = HEADERS.replace("MARK", "generation", 1).replace("ENDMARK", "endgeneration")
PLAIN = HEADERS.replace("{%- MARK %}", "").replace("{%- ENDMARK %}", "")


@pytest.fixture(scope="module", params=["bytes", "first", "always", "prepend"])
def tokenizer(request: pytest.FixtureRequest, tokenizer_file: Path) -> Tokenizer:
    """Return a tokenizer in bytes, or one of SentencePiece's kinds."""
    if request.param == "bytes":
        return Tokenizer.from_file(str(tokenizer_file))
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    if request.param == "prepend":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(steps)  # type: ignore[assignment]
    else:
        kind = pre_tokenizers.Metaspace(prepend_scheme=request.param, split=False)
        made.pre_tokenizer = kind  # type: ignore[assignment]
    special = ["<unk>", "<|endoftext|>", *VARIABLES.values()]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    made.train_from_iterator([json.dumps(RECORDS, ensure_ascii=False)], trainer)
    return made


@pytest.mark.parametrize("text", [CHAT_TEMPLATE, MARKED, PLAIN], ids=["chatml", "marked", "plain"])
@pytest.mark.parametrize("record", RECORDS, ids=["turns", "system", "tools"])
def test_texts_ids_and_masks_are_theirs(tokenizer, text, record):
    transformers = pytest.importorskip("transformers", minversion="5")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.to_str()), chat_template=text, **VARIABLES
    )
    template = ChatTemplate(text=text, variables=VARIABLES)
    encoder = ChatEncoder(tokenizer, template)
    conversation = parse_conversation(record)
    asked = {"conversation": record["messages"], "tools": record.get("tools")}
    written, answers = template.render(conversation)
    assert written == theirs.apply_chat_template(**asked, tokenize=False)
    found = theirs.apply_chat_template(
        **asked, return_dict=True, return_assistant_tokens_mask=text != PLAIN
    )
    ((ids, is_target),) = encoder.encode([conversation], "<|endoftext|>")
    assert ids.tolist() == [*found["input_ids"], theirs.convert_tokens_to_ids("<|endoftext|>")]
    if text != PLAIN:
        assert is_target.tolist() == [*map(bool, found["assistant_masks"]), False]
    spoken = [turn for turn in record["messages"] if turn["role"] == "assistant"]
    assert len(answers) == len(spoken)
    assert [written[answer.start : answer.end].endswith("<|im_end|>") for answer in answers]
    asked["conversation"] = record["messages"][:-1]
    found = theirs.apply_chat_template(**asked, add_generation_prompt=True, return_dict=True)
    history = conversation._replace(turns=conversation.turns[:-1])
    assert encoder.prompt(history).ids == found["input_ids"]
